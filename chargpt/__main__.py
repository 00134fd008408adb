"""`python -m chargpt` is `chargpt`."""

from chargpt.cli.main import run

if __name__ == "__main__":
    run()
