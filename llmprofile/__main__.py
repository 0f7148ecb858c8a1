"""`python -m llmprofile` is the command line."""

import sys

from llmprofile.cli import main

if __name__ == "__main__":
    sys.exit(main())
