"""`python -m qwen35_convert` is the command `qwen35`."""

from qwen35_convert.cli import main

if __name__ == "__main__":
    main()
