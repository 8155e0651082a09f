"""ms-swift: the file that `--external_plugins` takes; `python -m chatmill.trainers.ms_swift` prints its path."""

import sys

if __name__ == "__main__":
    sys.stdout.write(f"{__file__}\n")
else:
    from chatmill.trainers.swift_rows import give_rows

    give_rows()
