"""Computes the tables of many traces with the published mrm-trace, in an environment that has it::

    python published_tables.py CASES.parquet TABLES.jsonl

Each line of the output holds the tables of one case, in order, or null if mrm-trace raised.
"""

import json
import sys

import pandas as pd
from mrm_trace.analyser import compute_all


def tables(trace: pd.DataFrame) -> dict:
    found = compute_all(trace.drop(columns="case").reset_index(drop=True))
    return {
        name: {"columns": list(table.columns), "rows": table.astype(object).values.tolist()}
        for name, table in found.items()
    }


def plain(value: object) -> object:
    return value.item() if hasattr(value, "item") else str(value)


if __name__ == "__main__":
    cases = pd.read_parquet(sys.argv[1])
    with open(sys.argv[2], "w") as out:
        for _, trace in cases.groupby("case", sort=True):
            try:
                result = tables(trace)
            except Exception:
                result = None
            out.write(json.dumps(result, default=plain) + "\n")
