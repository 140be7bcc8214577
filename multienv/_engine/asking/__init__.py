"""Ask many workers: all in step, or each at its own pace."""
