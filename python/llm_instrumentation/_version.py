"""The one place of the release number; libstrap/build.sh and pyproject.toml read it."""

__version__ = "2.0.0"
