"""The tensors in a module's output are found, and named by their paths."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections import OrderedDict, namedtuple

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from llm_instrumentation.core.outputs import replace_tensor, split_name, walk_output
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers_cache import CACHE_NAME

A, B, C = torch.zeros(1), torch.zeros(2), torch.zeros(3)
Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Scores:
    logits: torch.Tensor
    extra: object = None
    past_key_values: object = None


class Color(enum.Enum):
    RED = 1


class Opaque:
    def __init__(self, **held):
        self.__dict__.update(held)


def paths(output, kv_cache=False, unwalked=None):
    return [path for path, _ in walk_output(output, kv_cache=kv_cache, unwalked=unwalked)]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (A, [("", A)]),
        ((A, None), [("", A)]),
        ([A], [("", A)]),
        ((A, B, C), [("", A), ("[1]", B), ("[2]", C)]),
        ((A, None, B), [("", A), ("[2]", B)]),
        ((None, A), [("[1]", A)]),
        ({"a": None, "b": A, "past_key_values": B}, [("['b']", A)]),
        (((A, B), C), [("[0][0]", A), ("[0][1]", B), ("[1]", C)]),
        ((A, (B, [C])), [("", A), ("[1][0]", B), ("[1][1][0]", C)]),
        ({"logits": A, "n": 3, 0: B}, [("['logits']", A), ("[0]", B)]),
        ({"it's": A, Color.RED: B}, [('["it\'s"]', A), ("[<Color.RED: 1>]", B)]),
        ({(1, 2): A}, [("[#0]", A)]),
        (Pair(A, Pair(None, B)), [("", A), ("[1][1]", B)]),
        (Scores(A, extra=[B]), [(".logits", A), (".extra[0]", B)]),
        (CausalLMOutputWithPast(logits=A, hidden_states=(B, C)),
         [("['logits']", A), ("['hidden_states'][0]", B), ("['hidden_states'][1]", C)]),
        (nn.Parameter(A), [("", A)]),
        (None, []),
        ((), []),
        ({"loss": None, "text": "abc", "shape": A.shape, "dtype": A.dtype}, []),
    ],
)  # fmt: skip
def test_paths_lead_to_the_tensors(output, expected):
    found = list(walk_output(output, kv_cache=False))
    assert [path for path, _ in found] == [path for path, _ in expected]
    for (_, tensor), (_, same) in zip(found, expected, strict=True):
        assert tensor.data_ptr() == same.data_ptr()


def test_an_lstm_and_a_packed_sequence():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    assert paths(packed) == ["", "[1]"]
    assert paths(nn.LSTM(4, 2)(packed)[1]) == ["", "[1]"]
    assert paths(nn.LSTM(4, 2)(torch.ones(3, 1, 4))) == ["", "[1][0]", "[1][1]"]


def llama(**options):
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()


def with_cache(cache):
    """Older transformers return tuples in place of a cache, unless they are given one."""
    return {CACHE_NAME: cache}


def test_the_key_value_cache_is_left_out_unless_asked_for():
    output = llama()(torch.zeros(1, 3, dtype=torch.long), **with_cache(DynamicCache()))
    assert paths(output) == ["['logits']"]
    found = dict(walk_output(output, kv_cache=True))
    logits, *cached = found
    assert logits == "['logits']"
    assert sorted(cached) == [
        f"['{CACHE_NAME}'][0].keys",
        f"['{CACHE_NAME}'][0].values",
        f"['{CACHE_NAME}'][1].keys",
        f"['{CACHE_NAME}'][1].values",
    ]
    assert found[f"['{CACHE_NAME}'][0].keys"].shape == (1, 2, 3, 8)


def test_tuple_outputs_of_a_model_name_their_places():
    ids = torch.zeros(1, 3, dtype=torch.long)
    output = llama()(ids, **with_cache(DynamicCache()), return_dict=False)
    assert paths(output) == [""]
    assert paths(output, kv_cache=True)[:2] == ["", "[1][0].keys"]


EMPTY_CACHES = [None, DynamicCache(), EncoderDecoderCache(DynamicCache(), DynamicCache())]
if hasattr(transformers.cache_utils, "StaticLayer"):  # before, static caches had memory at once
    config = transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=2)
    EMPTY_CACHES.append(StaticCache(config=config, max_cache_len=8))


@pytest.mark.parametrize("cache", EMPTY_CACHES)
def test_caches_that_are_empty_have_no_keys(cache):
    assert not [path for path in paths((A, cache), kv_cache=True) if path.endswith(".keys")]


def test_an_encoder_decoder_cache_has_two_parts():
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.zeros(1, 3, dtype=torch.long)
    output = model(input_ids=ids, decoder_input_ids=ids)
    if isinstance(output[CACHE_NAME], tuple):
        pytest.skip("a T5 of this transformers returns tuples in place of a cache")
    assert paths(output) == ["['logits']", "['encoder_last_hidden_state']"]
    assert [path for path in paths(output, kv_cache=True) if CACHE_NAME in path] == [
        f"['{CACHE_NAME}'].self_attention_cache[0].keys",
        f"['{CACHE_NAME}'].self_attention_cache[0].values",
        f"['{CACHE_NAME}'].cross_attention_cache[0].keys",
        f"['{CACHE_NAME}'].cross_attention_cache[0].values",
    ]


def test_legacy_caches_are_known_by_their_key():
    legacy = ((A, B), (A, B))
    assert paths({"logits": C, "past_key_values": legacy}) == ["['logits']"]
    assert paths(Scores(C, past_key_values=legacy)) == [".logits"]
    assert paths({"past_key_values": legacy}, kv_cache=True)[:2] == [
        "['past_key_values'][0][0]",
        "['past_key_values'][0][1]",
    ]


def test_caches_of_other_classes_are_walked():
    class Cache:  # like older transformers: a list of keys and a list of values
        key_cache = (A, B)
        value_cache = (A, B)

    class StateCache:  # like the caches of single models
        def __init__(self):
            self.states = {0: A}
            self.position = 3

    unwalked = set()
    assert paths((A, Cache(), StateCache()), unwalked=unwalked) == [""]
    assert paths((A, Cache()), kv_cache=True) == [
        "",
        "[1][0].keys",
        "[1][1].keys",
        "[1][0].values",
        "[1][1].values",
    ]
    assert paths((A, StateCache()), kv_cache=True) == ["", "[1].states[0]"]
    assert unwalked == set()


def test_types_that_hold_tensors_but_cannot_be_walked_are_reported():
    class Slotted:
        __slots__ = ("tensor",)

    slotted = Slotted()
    slotted.tensor = A
    unwalked = set()
    output = (A, Opaque(deep=[{"x": B}]), Opaque(name="no tensor"), slotted, {B}, iter([C]))
    assert paths(output, unwalked=unwalked) == [""]
    assert {name.rpartition(".")[2] for name in unwalked} == {
        "Opaque",
        "Slotted",
        "set",
        "list_iterator",
    }
    assert paths((A, Opaque(deep=B))) == [""]  # the caller does not ask for a report


def test_types_without_tensors_are_not_reported():
    unwalked = set()
    assert paths((A, Opaque(name="x"), object(), range(3), len), unwalked=unwalked) == [""]
    assert unwalked == set()


def test_cycles_end_and_deep_nesting_is_reported():
    loop = [A]
    loop.append(loop)
    assert paths({"loop": loop}) == ["['loop'][0]"]
    assert paths(loop) == [""]

    deep = A
    for _ in range(100):
        deep = [None, deep]
    unwalked = set()
    assert paths(deep, unwalked=unwalked) == []
    assert unwalked == {"builtins.list nested deeper than 64"}


def test_a_container_used_twice_is_walked_twice():
    shared = [A, B]
    assert paths({"x": shared, "y": shared}) == ["['x'][0]", "['x'][1]", "['y'][0]", "['y'][1]"]


keys = st.one_of(st.text(max_size=3), st.integers(-3, 3), st.none())
leaves = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.just("tensor"))
outputs = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Scores, inner, inner),
    ),
    max_leaves=12,
)


def with_tensors(value, made):
    """Replaces each "tensor" in `value` by a new tensor, which is added to `made`."""
    if value == "tensor":
        made.append(torch.empty(0))
        return made[-1]
    if isinstance(value, Pair):
        return Pair(*(with_tensors(v, made) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(v, made) for v in value)
    if isinstance(value, dict):
        return type(value)((k, with_tensors(v, made)) for k, v in value.items())
    if isinstance(value, Scores):
        return Scores(with_tensors(value.logits, made), with_tensors(value.extra, made))
    return value


@given(outputs)
def test_every_tensor_is_found_once_under_a_path_that_leads_to_it(value):
    made = []
    output = with_tensors(value, made)
    found = list(walk_output(output, kv_cache=False))
    assert [id(tensor) for _, tensor in found] == [id(tensor) for tensor in made]
    assert len({path for path, _ in found}) == len(found)
    for path, tensor in found:
        first = isinstance(output, (tuple, list)) and path == ""
        assert eval("output" + ("[0]" if first else path)) is tensor


# ---- one tensor by its name -------------------------------------------------------------------


def parts(output):
    return list(walk_output(output, kv_cache=False))


@given(outputs)
def test_each_tensor_can_be_replaced_by_its_path(value):
    output = with_tensors(value, [])
    before = parts(output)
    for place, (path, tensor) in enumerate(before):
        new, told = torch.empty(1), []

        def change(at, found, told=told, new=new):
            told.append((at, id(found)))
            return new

        changed = replace_tensor(output, path, change, of="h")
        assert told == [(path, id(tensor))] and type(changed) is type(output)
        expected = [*before[:place], (path, new), *before[place + 1 :]]
        assert [(at, id(one)) for at, one in parts(changed)] == [
            (at, id(one)) for at, one in expected
        ]
        assert [id(one) for _, one in parts(output)] == [id(one) for _, one in before]
        assert replace_tensor(output, path, lambda _, found: found, of="h") is output


@pytest.mark.parametrize(
    ("output", "path", "named"),
    [
        ((A, B), "[0]", ""),
        ([(A, B)], "", None),
        ({"x": A, "y": B}, "", "['x']"),
        ({"x": A, "y": B}, "[1]", "['y']"),
        ({1: A, "y": B}, "[1]", "[1]"),
        (Scores(A, extra=(B, C)), "['extra'][1]", ".extra[1]"),
        (types.MappingProxyType({"x": A}), "['x']", "['x']"),
        (CausalLMOutputWithPast(logits=A), "", "['logits']"),
        (torch.max(torch.eye(2), 0), "[1]", "[1]"),
    ],
)
def test_other_names_of_a_place(output, path, named):
    if named is None:
        with pytest.raises(InvalidArgumentError, match="'h': 'h' returns no tensor"):
            replace_tensor(output, path, lambda _, found: found, of="h")
        return
    changed = replace_tensor(output, path, lambda at, found: torch.full((7,), len(at)), of="h")
    assert type(changed) is type(output)
    assert dict(walk_output(changed, kv_cache=False))[named].tolist() == [len(named)] * 7


def test_a_changed_model_output_has_the_attribute_too():
    output = CausalLMOutputWithPast(logits=A, hidden_states=(B, C))
    changed = replace_tensor(output, "['hidden_states'][1]", lambda *_: A, of="h")
    assert changed.hidden_states[1] is changed["hidden_states"][1] is A
    assert output.hidden_states[1] is C


def test_a_place_without_a_tensor_is_told_with_those_that_there_are():
    with pytest.raises(InvalidArgumentError) as caught:
        replace_tensor((A, {"x": B}, None), "[2]", lambda *_: A, of="h.0")
    assert str(caught.value) == (
        "'h.0[2]': 'h.0' returns no tensor at this place but tuple, which has tensors at 'h.0', "
        "\"h.0[1]['x']\""
    )
    with pytest.raises(UnsupportedError, match="key-value cache"):
        replace_tensor((A, DynamicCache()), "[1][0].keys", lambda *_: A, of="h")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h.0", ("h.0", "")),
        ("h.0[1]['a[0]']", ("h.0", "[1]['a[0]']")),
        ("['logits']", ("", "['logits']")),
        ("", ("", "")),
        ("x[1]", ("x[1]", "")),
        ("x[1][0]", ("x[1]", "[0]")),
        ("h.1", None),
        ("h.0.weight", None),
    ],
)
def test_a_name_is_a_module_and_a_path(name, expected):
    assert split_name(name, {"", "h", "h.0", "x[1]"}) == expected
