"""Forms that cost a compiler much, or break one: bounds and the confined process are there for these."""

import json

from paceline.v1.sampling_pb2 import StructuredOutput

HOSTILE: dict[str, StructuredOutput] = {
    "nothing": StructuredOutput(),
    "deep": StructuredOutput(json_schema='{"items":' * 7_000 + "{}" + "}" * 7_000),
    "brackets": StructuredOutput(json_schema="[" * 65_000),
    "parentheses": StructuredOutput(regex="(" * 2_000 + "a" + ")" * 2_000),
    "groups of a grammar": StructuredOutput(grammar="start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "quotes": StructuredOutput(grammar='"\\' * 32_000),
    "slashes": StructuredOutput(grammar="start: " + "/\\" * 32_000),
    "signs": StructuredOutput(grammar="start: " + "<a" * 32_000),
    "rules": StructuredOutput(grammar="start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(2_000))),
    "doubling rules": StructuredOutput(
        grammar="start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "x"?'
    ),
    "ambiguous rules": StructuredOutput(grammar='start: start start | "a" | '),
    "empty loops": StructuredOutput(grammar='start: a*\na: b*\nb: "x"*'),
    "nested counts": StructuredOutput(regex="(((a{10}){10}){10}){10}"),
    "nested stars": StructuredOutput(regex="(x+x+)+y"),
    "far choices": StructuredOutput(regex="(a|b)*a(a|b){60}"),
    "classes": StructuredOutput(regex=r"[\w&&[^\d]]" * 300),
    "unicode": StructuredOutput(regex=r"(?i)\p{L}{500}"),
    "counts beyond numbers": StructuredOutput(regex="a{99999999999999999999}"),
    "many counts": StructuredOutput(regex="a{0,1000}" * 400),
    "enum": StructuredOutput(json_schema=json.dumps({"enum": [f"{i}" for i in range(4_096)]})),
    "cases": StructuredOutput(
        json_schema=json.dumps(
            {"allOf": [{"anyOf": [{"properties": {f"{i}_{j}": {}}} for j in range(2)]} for i in range(14)]}
        )
    ),
    "references": StructuredOutput(
        json_schema=json.dumps(
            {
                "$ref": "#/$defs/0",
                "$defs": {f"{i}": {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(100)} | {"100": {}},
            }
        )
    ),
    "a loop of references": StructuredOutput(
        json_schema=json.dumps(
            {"$ref": "#/$defs/0", "$defs": {f"{i}": {"$ref": f"#/$defs/{(i + 1) % 500}"} for i in range(500)}}
        )
    ),
    "properties": StructuredOutput(json_schema=json.dumps({"properties": {f"p{i}": {} for i in range(500)}})),
    "patterns of names": StructuredOutput(
        json_schema=json.dumps({"patternProperties": {f"^{'a?' * i}$": {} for i in range(100)}})
    ),
    "a long text": StructuredOutput(json_schema='{"type":"string","minLength":1000000,"maxLength":1000001}'),
    "a large number": StructuredOutput(json_schema='{"type":"integer","minimum":' + "9" * 4_000 + "}"),
    "a multiple": StructuredOutput(json_schema='{"type":"number","multipleOf":0.000001,"maximum":1e300}'),
    "half a pair": StructuredOutput(json_schema='{"const":"\\ud800"}'),
    "a name": StructuredOutput(json_schema=json.dumps({"required": ["x" * 60_000], "type": "object"})),
}
