"""`codegen compare`: proves that two renderings of a package have the same machine code.

`sources` finds the kernels whose code and imports did not change; `launches` compiles the kernels that a call launches
and describes each at one of three levels; `proof` compares two packages level by level; `calls` selects what is called;
`rekey` rewrites the hashes in tuned files where the proof holds; `report` prints; `command` runs it all.
"""
