// The rules that give a type to rows by their symbol, dso, phase and operation.

package label

import (
	"regexp"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Rule gives a type to the rows that match all of its fields. An empty field matches every row.
// Phase and Op must be equal to those of the row. Symbol and DSO are regular expressions that match
// anywhere in the text, in upper or lower case. Their syntax is RE2's:
// https://github.com/google/re2/wiki/Syntax
type Rule struct {
	Type   string `json:"region_type"`
	Phase  string `json:"phase"`
	Op     string `json:"op_type"`
	Symbol string `json:"symbol_re"`
	DSO    string `json:"dso_re"`
}

// DefaultRules returns the documented rules, for llama.cpp and vLLM. The first rule that matches
// counts.
func DefaultRules() []Rule {
	return []Rule{
		{Type: weight, Phase: "weight_load", Op: "store"},
		{Type: weight, Phase: "weight_load"},
		// This rule stands before those for kernels of weights, because the names of some of these
		// kernels contain the name of a cache.
		{Type: kvCache, Symbol: `kv_cache|kv_update|kv_read|kv_write|attn_cache|llama_kv`},
		{Type: weight, Symbol: `ggml_vec_dot|ggml_mul_mat|ggml_q[48]_k|ggml_q[48]\b`},
		{Type: weight, Symbol: `ggml_init|ggml_new_tensor|ggml_set_|model_load|load_model|load_weight`},
		{Type: activation, Symbol: `ggml_compute|ggml_add|ggml_silu|ggml_norm|ggml_rms_norm|ggml_rope`},
		{Type: runtime, Symbol: `^(malloc|calloc|realloc|free|mmap|munmap|brk)$`},
	}
}

type compiledRule struct {
	Rule
	symbol, dso *regexp.Regexp // nil matches any text
}

func compile(rules []Rule) ([]compiledRule, error) {
	compiled := make([]compiledRule, len(rules))
	for i, rule := range rules {
		if err := checkType(rule.Type); err != nil {
			return nil, status.Wrap(status.InvalidArgument, err, "rule %d", i)
		}
		if rule.Op != "" && rule.Op != "load" && rule.Op != "store" {
			return nil, status.New(status.InvalidArgument, "rule %d: op_type %q is neither load nor store", i, rule.Op)
		}
		compiled[i].Rule = rule
		for _, p := range []struct {
			name, pattern string
			into          **regexp.Regexp
		}{{"symbol_re", rule.Symbol, &compiled[i].symbol}, {"dso_re", rule.DSO, &compiled[i].dso}} {
			if p.pattern == "" {
				continue
			}
			re, err := regexp.Compile("(?i)" + p.pattern)
			if err != nil {
				return nil, status.Wrap(status.InvalidArgument, err, "rule %d: %s %q", i, p.name, p.pattern)
			}
			*p.into = re
		}
	}
	return compiled, nil
}

func (r *compiledRule) matches(symbol, dso, phase, op string) bool {
	return (r.Phase == "" || r.Phase == phase) &&
		(r.Op == "" || r.Op == op) &&
		(r.symbol == nil || r.symbol.MatchString(symbol)) &&
		(r.dso == nil || r.dso.MatchString(dso))
}
