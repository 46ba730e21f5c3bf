package label

import (
	"regexp"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Rule gives a type to rows that match all it names; what is empty matches any row.
// The patterns are searched for without regard to case, in RE2's syntax:
// https://github.com/google/re2/wiki/Syntax
type Rule struct {
	Type   string `json:"region_type"`
	Phase  string `json:"phase"`
	Op     string `json:"op_type"`
	Symbol string `json:"symbol_re"`
	DSO    string `json:"dso_re"`
}

// DefaultRules are the documented ones, for llama.cpp and vLLM; the first that
// matches wins.
func DefaultRules() []Rule {
	return []Rule{
		{Type: weight, Phase: "weight_load", Op: "store"},
		{Type: weight, Phase: "weight_load"},
		// Before the weights' kernels, some of which have a cache's name in theirs.
		{Type: kvCache, Symbol: `kv_cache|kv_update|kv_read|kv_write|attn_cache|llama_kv`},
		{Type: weight, Symbol: `ggml_vec_dot|ggml_mul_mat|ggml_q[48]_k|ggml_q[48]\b`},
		{Type: weight, Symbol: `ggml_init|ggml_new_tensor|ggml_set_|model_load|load_model|load_weight`},
		{Type: activation, Symbol: `ggml_compute|ggml_add|ggml_silu|ggml_norm|ggml_rms_norm|ggml_rope`},
		{Type: runtime, Symbol: `^(malloc|calloc|realloc|free|mmap|munmap|brk)$`},
	}
}

type compiledRule struct {
	Rule
	symbol, dso *regexp.Regexp // nil: any
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
