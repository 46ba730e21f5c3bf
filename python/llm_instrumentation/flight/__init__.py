"""Keeps the last steps of a model in memory, and writes them when something goes wrong."""

from .._dump_requests import AskedDump, request_dump
from ._callbacks import lightning_callback, trainer_callback
from ._dumps import Dump, Trigger, load_trigger
from ._narrow import Narrowed, Operand, narrow
from ._recorder import FlightRecorder, FlightStats, flight_recorder

__all__ = [
    "AskedDump",
    "Dump",
    "FlightRecorder",
    "FlightStats",
    "Narrowed",
    "Operand",
    "Trigger",
    "flight_recorder",
    "lightning_callback",
    "load_trigger",
    "narrow",
    "request_dump",
    "trainer_callback",
]
