"""Entry point of ``hotrain`` and ``python -m hotrain.cli``; without typer it says what to install."""

from __future__ import annotations

import sys
import warnings
from typing import Any


def main() -> None:
    """Run the command line, or say in one line how to install what it needs."""
    try:
        from hotrain.cli.main import app
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        from hotrain._version import __version__, install_extra

        if sys.argv[1:] == ["--version"]:
            print(f"hotrain {__version__}")
            return
        raise SystemExit(
            f"hotrain {__version__}: the command line needs {missing.name}; {install_extra('train,plot')} brings it, "
            "and what draws reports and figures"
        ) from None
    warnings.formatwarning = _warning
    app()


def _warning(message: Warning | str, *_: Any, **__: Any) -> str:
    """A warning as one line, without the line of source that warned."""
    return f"warning: {' '.join(str(message).split())}\n"


if __name__ == "__main__":
    main()
