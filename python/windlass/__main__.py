"""The `windlass` command, as `python -m windlass` and as the script that `pip` installs."""

import os
import sys
from typing import NoReturn

from ._error import Error
from ._files import command


def main() -> NoReturn:
    """Becomes the command, with this program's arguments."""
    try:
        path = command()
        os.execv(path, ["windlass", *sys.argv[1:]])
    except (Error, OSError) as error:
        sys.exit(f"windlass: {error}")


if __name__ == "__main__":
    main()
