"""The typed expression tree, its parser, derivatives and printers."""
