"""Builds the library of native operators into the package: `python -m outrider.native [COMPILER]`."""

import platform
import sys

from outrider.native.build import build, find_compiler, in_package, is_supported


def main() -> None:
    """Build with the compiler that is given, or found; end with an error in one line if that fails."""
    if not is_supported():
        print(f"there are no native operators for {sys.platform} on {platform.machine()}")
        return
    compiler = sys.argv[1] if len(sys.argv) > 1 else find_compiler()
    if compiler is None:
        sys.exit("outrider: error: no C++ compiler was found")
    path = in_package()
    try:
        for other in path.parent.glob("operators-*.so"):
            other.unlink()
        build(path, compiler)
    except OSError as error:
        sys.exit(f"outrider: error: {error}")
    print(path)


if __name__ == "__main__":
    main()
