"""The entry point: the app, or the way to it where the packages of the `cli` extra are missing."""

import sys
from importlib.util import find_spec

MODULES = {"typer": "typer", "rich": "rich", "matplotlib": "matplotlib", "scikit-learn": "sklearn"}
MISSING = [package for package, module in MODULES.items() if find_spec(module) is None]

if MISSING:

    def app() -> None:
        """Exits with status 1 and one line that says what to install."""
        sys.exit(f"samplewise: the command line needs {', '.join(MISSING)}. Install it: pip install 'samplewise[cli]'")

else:
    from samplewise.cli.commands import app

__all__ = ["app"]

if __name__ == "__main__":
    app()
