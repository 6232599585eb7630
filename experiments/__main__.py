"""`python -m experiments` is `marlaas`."""

from experiments.cli import main

if __name__ == "__main__":
    main()
