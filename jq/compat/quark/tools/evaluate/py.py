"""The same tool for `python -m jq.compat.quark.tools.evaluate.py`, which is how AMD's guide spells it."""

from jq.compat.quark.tools.evaluate import main

if __name__ == "__main__":
    main()
