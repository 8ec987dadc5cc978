"""Start the operator: ``python -m tracerl_operator``."""

from tracerl_operator.shell.run import main

if __name__ == "__main__":
    raise SystemExit(main())
