# Aliases of run.py, which works where there is no make.
PY ?= python3

.PHONY: run test test-all site clean
run test test-all site clean:
	@$(PY) run.py $@
