"""Keeps the last steps of a model in memory, and writes them when something goes wrong."""

from .dumps import Dump
from .recorder import FlightRecorder, FlightStats, flight_recorder

__all__ = ["Dump", "FlightRecorder", "FlightStats", "flight_recorder"]
