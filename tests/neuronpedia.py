"""What the schema 1.0.0 of Neuronpedia's attribution graphs asks for."""

from __future__ import annotations

TEXT, NUMBER, WHOLE = {"type": "string"}, {"type": "number"}, {"type": "integer"}


def required(**fields):
    """An object that has all these fields."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def several(items):
    return {"type": "array", "items": items}


SCHEMA = required(
    metadata=required(slug=TEXT, scan=TEXT, prompt=TEXT, prompt_tokens=several(TEXT)),
    qParams={
        "type": "object",
        "properties": {
            "pinnedIds": several(TEXT),
            "supernodes": several({}),
            "linkType": TEXT,
            "clickedId": TEXT,
        },
    },
    nodes=several(
        required(
            node_id=TEXT,
            jsNodeId=TEXT,
            feature={"type": ["integer", "null"]},
            layer={"type": ["string", "integer"]},
            ctx_idx=WHOLE,
            feature_type=TEXT,
            clerp=TEXT,
        )
    ),
    links=several(required(source=TEXT, target=TEXT, weight=NUMBER)),
)
SCHEMA["properties"]["metadata"]["properties"]["node_threshold"] = NUMBER
SCHEMA["properties"]["nodes"]["items"]["properties"].update(
    influence={"type": ["number", "null"]}, activation={"type": ["number", "null"]}
)
