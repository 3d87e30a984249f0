"""The passes, one file each, as in `jq/passes`."""
