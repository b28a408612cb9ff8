"""Which forms are refused, with what reason and where, and what the text of the others allows."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from edge_rig.tokenizers import byte_level_tokenizer
from form_walks.walks import WalkEnd, takes, walk
from paceline.forms.compiling import check_form
from paceline.forms.errors import FormError, Reason
from paceline.forms.grammar import grammar_of
from paceline.v1.sampling_pb2 import WHITESPACE_COMPACT, Choice, StructuredOutput, Tag, Tags

INTEGER = '{"type":"integer"}'


def schema(document):
    return StructuredOutput(json_schema=json.dumps(document))


def refusal(structured):
    with pytest.raises(FormError) as caught:
        check_form(structured)
    return caught.value


def refusal_before_compiling(structured):
    with pytest.raises(FormError) as caught:
        grammar_of(structured)
    return caught.value


def nested(levels):
    """A schema whose document has so many levels."""
    document = {}
    for _ in range((levels - 1) // 2):
        document = {"properties": {"a": document}}
    return document if levels % 2 else {"allOf": document}


def tags(*tags, **fields):
    return StructuredOutput(tags=Tags(tags=tags, **fields))


TOO_LARGE = {
    "bytes of a schema": (schema({"title": "x" * 65_523}), schema({"title": "x" * 65_524}), "65537 bytes"),
    "bytes of a pattern": (StructuredOutput(regex="a" * 4096), StructuredOutput(regex="a" * 4097), "4097 bytes"),
    "bytes of a grammar": (
        StructuredOutput(grammar='start: "a"' + " " * 65_526),
        StructuredOutput(grammar='start: "a"' + " " * 65_527),
        "65537 bytes",
    ),
    "choices": (
        StructuredOutput(choice=Choice(options=["a"] * 1024)),
        StructuredOutput(choice=Choice(options=["a"] * 1025)),
        "1025 items",
    ),
    "bytes of choices": (
        StructuredOutput(choice=Choice(options=["a" * 65_536])),
        StructuredOutput(choice=Choice(options=["a" * 65_536, "a"])),
        "65537 bytes",
    ),
    "tags": (
        tags(*(Tag(begin=f"<{index}>", regex="a") for index in range(128))),
        tags(*(Tag(begin=f"<{index}>", regex="a") for index in range(129))),
        "129 items",
    ),
    "levels": (schema(nested(64)), schema(nested(65)), "more than 64 levels"),
    "values": (schema({"examples": [0] * 9_998}), schema({"examples": [0] * 9_999}), "more than 10000 values"),
    "values of an enum": (schema({"enum": [*range(4096)]}), schema({"enum": [*range(4097)]}), "4097 values"),
    "optional properties": (
        schema({"properties": {str(index): {} for index in range(501)}, "required": ["0"]}),
        schema({"properties": {str(index): {} for index in range(501)}}),
        "501 optional properties",
    ),
    "repetitions of a pattern": (
        StructuredOutput(regex="((a{10}b){100,}?){1,10}"),
        StructuredOutput(regex="((a{10}b){100,}?){1,11}"),
        "11000 times",
    ),
    "repetitions of a repetition": (
        StructuredOutput(regex="a{100}{100}"),
        StructuredOutput(regex="a{100}{101}"),
        "10100 times",
    ),
    "repetitions in a schema": (
        schema({"pattern": "^(a{100}){100}$"}),
        schema({"pattern": "^(a{1000}){1000}$"}),
        "the pattern at # repeats a part 1000000 times",
    ),
    "repetitions in a grammar": (
        StructuredOutput(grammar="start: /[{]{5}(a{10}){1000}/"),
        StructuredOutput(grammar="\nstart: /[{]{5}(a{10}){1001}/"),
        "the regular expression in line 2 repeats a part 10010 times",
    ),
}
"""The largest that is taken, the smallest that is not, and what is said."""


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_form_above_a_bound_is_refused_before_it_is_compiled_and_one_at_it_is_not(name):
    largest, larger, sentence = TOO_LARGE[name]
    grammar_of(largest)
    error = refusal_before_compiling(larger)
    assert error.reason == Reason.TOO_LARGE
    assert sentence in error.sentence


REFUSED_UNCOMPILED = {
    "no form": (StructuredOutput(), Reason.MALFORMED, "structured"),
    "whitespace of no meaning": (
        StructuredOutput(regex="a", whitespace=7),
        Reason.MALFORMED,
        "structured.whitespace: is 7",
    ),
    "no object": (StructuredOutput(json_object=False), Reason.MALFORMED, "structured.json_object"),
    "no choice": (StructuredOutput(choice=Choice()), Reason.MALFORMED, "structured.choice.options: is empty"),
    "no JSON": (StructuredOutput(json_schema="{"), Reason.MALFORMED, "structured.json_schema: is no JSON"),
    "brackets without end": (StructuredOutput(json_schema="[" * 65_000), Reason.TOO_LARGE, "structured.json_schema"),
    "NaN": (StructuredOutput(json_schema='{"minimum":NaN}'), Reason.MALFORMED, "NaN is no number"),
    "a number beyond 64 bits": (StructuredOutput(json_schema='{"minimum":1e400}'), Reason.MALFORMED, "1e400"),
    "no schema": (schema([]), Reason.MALFORMED, "is no JSON Schema"),
    "options of the compiler": (
        schema({"properties": {"a": {"x-guidance": {"lenient": True}}}}),
        Reason.UNSUPPORTED,
        "has x-guidance at #/properties/a",
    ),
    "a reference out of the document": (
        schema({"items": {"$ref": "https://example.com/a.json"}}),
        Reason.UNSUPPORTED,
        "has a $ref to 'https://example.com/a.json' at #/items",
    ),
    "a schema that is itself": (schema({"$ref": "#"}), Reason.MALFORMED, "has no finite value at #:"),
    "a property that is itself": (
        schema({"properties": {"a": {"$ref": "#/properties/a"}}}),
        Reason.MALFORMED,
        "has no finite value at #/properties/a",
    ),
    "an object that needs another one of its kind": (
        schema({"type": "object", "required": ["a"], "properties": {"a": {"anyOf": [{"$ref": "#"}]}}}),
        Reason.MALFORMED,
        "has no finite value at #:",
    ),
    "a list that needs another one of its kind": (
        schema({"type": "array", "minItems": 1, "items": {"allOf": [{}, {"$ref": "#"}]}}),
        Reason.MALFORMED,
        "has no finite value at #:",
    ),
    "the compiler's own form": (StructuredOutput(grammar=' {"grammars":[]}'), Reason.UNSUPPORTED, "begins with {"),
    "a range of tokens": (
        StructuredOutput(grammar='start: "a"\n  | <[*]>'),
        Reason.UNSUPPORTED,
        "names the token <[*]>; write its text in quotes, in line 2",
    ),
    "a token": (StructuredOutput(grammar="start: <|eot|>"), Reason.UNSUPPORTED, "names the token <|eot|>"),
    "another grammar": (StructuredOutput(grammar="start: @form_0"), Reason.UNSUPPORTED, "refers to the grammar"),
    "parameters": (StructuredOutput(grammar="start: a::1"), Reason.UNSUPPORTED, "parameters"),
    "an open text": (StructuredOutput(grammar='start: "a'), Reason.MALFORMED, 'has an open " in line 1'),
    "no schema in a grammar": (StructuredOutput(grammar="start: %json ]"), Reason.MALFORMED, "behind %json in line 1"),
    "deep brackets in a grammar": (
        StructuredOutput(grammar="start: %json " + "[" * 60_000),
        Reason.TOO_LARGE,
        "levels in line 1",
    ),
    "options in a grammar's schema": (
        StructuredOutput(grammar='start: %json {"x-guidance":{}}'),
        Reason.UNSUPPORTED,
        "has x-guidance at #",
    ),
    "a mark without text": (tags(Tag(regex="a")), Reason.MALFORMED, "structured.tags.tags[0].begin: is empty"),
    "a mark in a mark": (
        tags(Tag(begin="<a", regex="a"), Tag(begin="x<ab>", regex="a")),
        Reason.MALFORMED,
        "structured.tags.tags[1].begin: contains that of tag 0",
    ),
    "a tag without form": (tags(Tag(begin="<a>")), Reason.MALFORMED, "structured.tags.tags[0]: has no form"),
}


@pytest.mark.parametrize("name", REFUSED_UNCOMPILED)
def test_what_no_compiler_shall_see_is_refused_with_its_place(name):
    structured, reason, sentence = REFUSED_UNCOMPILED[name]
    error = refusal_before_compiling(structured)
    assert error.reason == reason
    assert sentence in str(error)


@pytest.mark.parametrize(
    "command",
    ['stop="x"', "max_tokens=3", "temperature=0.5", 'suffix = "x"', "capture", "lazy, capture", 'capture="a"'],
)
def test_a_command_in_a_grammar_is_refused_by_its_name(command):
    error = refusal_before_compiling(StructuredOutput(grammar=f"start: a\na[{command}]: /x/"))
    assert error.reason == Reason.UNSUPPORTED
    assert "in line 2" in error.sentence


@pytest.mark.parametrize("directive", ["%llguidance {}", "%lark { }", "%regex {}", "%if x", "%"])
def test_a_directive_in_a_grammar_is_refused_by_its_name(directive):
    error = refusal_before_compiling(StructuredOutput(grammar=f'start: "a" {directive}'))
    assert error.reason == Reason.UNSUPPORTED
    assert directive.partition(" ")[0] in error.sentence


REFUSED_COMPILED = {
    "a keyword": (
        schema({"properties": {"a": {"not": {}}}}),
        Reason.UNSUPPORTED,
        "has the keyword not at #/properties/a",
    ),
    "cases that overlap": (
        schema({"items": {"oneOf": [{"type": "string"}, {"minLength": 3}]}}),
        Reason.UNSUPPORTED,
        "has a oneOf at #/items whose cases may overlap; use anyOf",
    ),
    "an unknown document": (
        schema({"$id": "https://example.com/", "$ref": "a.json"}),
        Reason.UNSUPPORTED,
        "has a $ref to what the document has not",
    ),
    "an unknown type": (schema({"type": "text"}), Reason.MALFORMED, "Invalid type: text"),
    "no value": (schema({"type": "array", "minItems": 2, "maxItems": 1}), Reason.MALFORMED, "allows no value"),
    "lookahead": (StructuredOutput(regex="(?=a)b"), Reason.UNSUPPORTED, "look-ahead"),
    "lookahead in a schema": (schema({"pattern": "(?=a)b"}), Reason.UNSUPPORTED, "look-ahead"),
    "back-reference": (StructuredOutput(regex=r"(a)\1"), Reason.UNSUPPORTED, "backreferences"),
    "open group": (StructuredOutput(regex="("), Reason.MALFORMED, "unclosed group"),
    "deep groups": (StructuredOutput(regex="(" * 2000 + ")" * 2000), Reason.TOO_COMPLEX, "nested parentheses"),
    "deep groups of a grammar": (
        StructuredOutput(grammar="start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
        Reason.TOO_COMPLEX,
        "too deeply nested",
    ),
    "many states": (StructuredOutput(regex="(?:a?){5000}a{5000}"), Reason.TOO_COMPLEX, "too many expressions"),
    "an unknown rule": (StructuredOutput(grammar="start: a"), Reason.MALFORMED, 'unknown name: "a"'),
    "a rule that is itself": (StructuredOutput(grammar="start: start"), Reason.MALFORMED, "allows no output"),
    "a tag's keyword": (
        tags(Tag(begin="<a>", regex="a"), Tag(begin="<b>", json_schema='{"not":{}}')),
        Reason.UNSUPPORTED,
        "structured.tags.tags[1].json_schema: has the keyword not at #",
    ),
}


@pytest.mark.parametrize("name", REFUSED_COMPILED)
def test_what_the_compiler_cannot_do_is_refused_with_its_place(name):
    structured, reason, sentence = REFUSED_COMPILED[name]
    grammar_of(structured)
    error = refusal(structured)
    assert error.reason == reason
    assert sentence in str(error)


TAKEN = {
    "any JSON": (schema(True), ("1", '{"a": [null]}'), ("", "[")),
    "a schema": (
        schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        ('{"a": 1}', '{"a":' + " " * 32 + "1}"),
        ("{}", '{"a":' + " " * 33 + "1}"),
    ),
    "a compact schema": (
        StructuredOutput(json_schema='{"type":"array","items":{"const":1}}', whitespace=WHITESPACE_COMPACT),
        ("[1,1]", "[]"),
        ("[1, 1]",),
    ),
    "a count with a point": (StructuredOutput(json_schema='{"type":"array","maxItems":1.0}'), ("[1]",), ("[1,1]",)),
    "an object": (StructuredOutput(json_object=True), ('{"a": 1}',), ("[]",)),
    "a format that is an annotation": (schema({"type": "string", "format": "colour"}), ('"red"',), ("1",)),
    "a format that is kept": (schema({"type": "string", "format": "date"}), ('"2026-01-31"',), ('"red"',)),
    "a constant with the key format": (schema({"const": {"format": "colour"}}), ('{"format":"colour"}',), ("{}",)),
    "a property named as the compiler's options": (
        schema({"type": "object", "properties": {"x-guidance": {"const": 1}}, "additionalProperties": False}),
        ('{"x-guidance":1}', "{}"),
        ('{"x-guidance":2}',),
    ),
    "a list of itself": (
        schema({"type": "array", "items": {"$ref": "#"}}),
        ("[]", "[[], [[]]]"),
        ("[1]",),
    ),
    "a union told apart by a constant": (
        schema(
            {
                "oneOf": [
                    {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]},
                    {"type": "object", "properties": {"a": {"const": "y"}}, "required": ["a"]},
                ]
            }
        ),
        ('{"a":"y"}',),
        ('{"a":"z"}', "{}"),
    ),
    "a pattern": (StructuredOutput(regex='^a/b"\n[/]$'), ('a/b"\n/',), ("a/b",)),
    "a pattern with an escaped slash": (StructuredOutput(regex="a\\/\\\n"), ("a/\n",), ("a",)),
    "no text": (StructuredOutput(regex=""), ("",), ("a",)),
    "choices": (
        StructuredOutput(choice=Choice(options=["a", "ab", 'é"\n\x01', "<|eot|>"])),
        ("a", "ab", 'é"\n\x01', "<|eot|>"),
        ("", "b"),
    ),
    "a grammar": (
        StructuredOutput(
            grammar="%import common.INT\n%ignore / +/\n"
            'start: "stop=<a>" INT // stop=\n | %json {"format":"colour","type":"null"}'
        ),
        ("stop=<a> 1", "null"),
        ("stop=<a>",),
    ),
    "tags": (
        tags(Tag(begin="<a>", json_schema=INTEGER, end="</a>"), Tag(begin="<b>", grammar="start: /x+/")),
        ("", "text", "some <a>1</a> and <b>xx.", "<c>"),
        ("<a>", "<a>x</a>", "<a>1", "text <b>"),
    ),
    "at least one tag": (tags(Tag(begin="<a>", regex="x"), required=True), ("<a>x", ".<a>x.<a>x."), ("", "text")),
    "at most one tag": (
        tags(Tag(begin="<a>", regex="x"), at_most_one=True),
        ("", "text", ".<a>x"),
        ("<a>", "<a>x."),
    ),
    "one tag": (tags(Tag(begin="<a>", regex="x"), required=True, at_most_one=True), (".<a>x",), ("", "<a>x.")),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_form_allows_what_it_says(name):
    structured, outputs, others = TAKEN[name]
    check_form(structured)
    assert [text for text in outputs if not takes(grammar_of(structured), text)] == []
    assert [text for text in others if takes(grammar_of(structured), text)] == []


MARKS = ("<call>", "</call>", "<think>")


def test_a_mark_that_is_one_token_may_be_that_token_or_be_spelled():
    """The library takes such a token for none of a text: with text alone a model could not draw what it was taught."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    library = LLTokenizer(tokenizer.to_str(), eos_token=0)

    def takes(structured, *parts, tokens=MARKS):
        matcher = LLMatcher(library, grammar_of(structured, tokens), log_level=0)
        whole = {mark: [tokenizer.token_to_id(mark)] for mark in MARKS}
        ids = [each for part in parts for each in whole.get(part) or library.tokenize_str(part)]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    form = tags(Tag(begin="<call>\n", json_schema=INTEGER, end="\n</call>"))
    output = ("<think>", "hm", "<call>", "\n", "1", "\n", "</call>", "so ", "<call>", "\n", "2", "\n", "</call>")
    assert takes(form, *output)
    assert takes(form, "so <ca", "ll>\n", "1", "\n", "</call>", "<think>", " .")
    assert not takes(form, *output, tokens=())
    assert not takes(form, "<call>", "1")
    assert not takes(form, "<call>", "\n", "1", "</call>")
    once = tags(Tag(begin="<call>", regex="x"), at_most_one=True, required=True)
    assert takes(once, "<think>", "<call>", "x")
    assert not takes(once, "<think>", "<call>", "x", "<call>", "x")
    assert not takes(once, "<think>")


@pytest.mark.parametrize(
    "options", [{"whitespace_flexible": False}, {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}]
)
def test_the_text_of_a_schema_is_what_the_library_would_make_of_it(options):
    made = json.loads(LLMatcher.grammar_from_json_schema('{"type":"object"}', overrides=options))
    is_compact = "whitespace_flexible" in options
    ours = json.loads(
        grammar_of(StructuredOutput(json_object=True, whitespace=WHITESPACE_COMPACT if is_compact else 0))
    )
    assert ours["grammars"][0]["json_schema"] == made["grammars"][0]["json_schema"]


# What forms are made of, and what breaks parsers of these.
_PIECES = r"""
"type" "object" "array" "string" "properties" "a" "$ref" "#" "#/$defs/a" "$defs" "anyOf" "allOf" "items" "required"
"enum" "minItems" "pattern" "const" 1 -1 1e999 { } [ ] : , true null start | ( ) / /a/ " \ %json %ignore [lazy] < >
{2} {,9} * + ? ^ $ . \p{L} [^ - (?i) & ~ é # // @ ::
"""
_KEYWORDS = """
type properties items anyOf oneOf allOf $ref $defs required enum const a minItems maxItems additionalProperties
patternProperties
"""
_TEXTS = st.lists(st.sampled_from((*_PIECES.split(), " ", "\n", "\0")) | st.characters(codec="utf-8"), max_size=24).map(
    "".join
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from(("object", "array", "string", "#", "#/$defs/a")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYWORDS.split()), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.builds(StructuredOutput, json_schema=_TEXTS | _VALUES.map(json.dumps))
    | st.builds(StructuredOutput, regex=_TEXTS)
    | st.builds(StructuredOutput, grammar=_TEXTS.map("start: ".__add__))
    | st.builds(lambda begin, form: tags(Tag(begin=begin, regex=form)), _TEXTS, _TEXTS)
)
def test_whatever_is_asked_for_is_refused_or_can_be_followed(structured):
    try:
        check_form(structured)
    except FormError:
        return
    end, text = walk(grammar_of(structured), "")
    assert end in (WalkEnd.ENDED, WalkEnd.OPEN), text
