"""Ask many workers: all in step, or each at its own pace. Not public: see the env classes."""
