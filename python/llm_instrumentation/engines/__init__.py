"""Captures of inference engines that run their models in processes of their own."""
