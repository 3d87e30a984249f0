"""`python -m jq`: see `jq.cli`."""

from jq.cli import main

main()
