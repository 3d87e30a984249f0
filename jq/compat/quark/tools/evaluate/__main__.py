"""The entry of `python -m jq.compat.quark.tools.evaluate`."""

from jq.compat.quark.tools.evaluate import main

if __name__ == "__main__":
    main()
