"""`python -m dagresume` is `dagresume`."""

from dagresume.cli import main

if __name__ == "__main__":
    main()
