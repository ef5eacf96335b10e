"""`python -m streamrl`: the same as the `streamrl` command."""

from streamrl.cli import main

if __name__ == "__main__":
    main()
