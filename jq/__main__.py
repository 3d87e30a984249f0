"""`python -m jq`: the command `jq-quant`."""

from jq_quant import main

main()
