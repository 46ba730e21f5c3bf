"""The formats of other libraries, read and written."""
