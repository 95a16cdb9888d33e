# Everything is done by ./make, which needs no GNU make.
TARGETS := demo quick test lint bench mutants cluster node images release constraints clean help
.PHONY: $(TARGETS)
.DEFAULT_GOAL := help
$(TARGETS):
	@./make $@ $(ARGS)
