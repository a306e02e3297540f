"""Code that only disposable processes run: ceilings, ledgers, gradient probes. Nothing here is undone."""
