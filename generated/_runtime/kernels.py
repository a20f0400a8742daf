# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# template: ops/kernels.py.jinja
# hash: 11dcbcef9e56fb32
"""What each kernel's code is, as a hash: tuned tiles hold for the code they were measured on."""

# variant -> mode of calls -> pass -> hash of the kernel's file without comments and docstrings
KERNEL_HASHES: dict[str, dict[str, dict[str, str]]] = {
    "full": {
        "dense": {
            "fwd": "5f7c13e5d5a62f8e",
            "dq": "23b8073fbb5e7868",
            "dkdv": "46be56b8a6913495",
            "hopper_fwd": "cf85c1edaecc6797",
            "hopper_bwd": "f8f051e91703e508",
        },
        "packed": {
            "fwd": "91a6cf19c5e99c59",
            "dq": "018b5b33f7d8deb9",
            "dkdv": "b254008df5b983a0",
            "hopper_fwd": "c9d81401e9778ba7",
            "hopper_bwd": "c2f0047ed6440fa3",
        },
        "segmented": {
            "fwd": "a14d3099d522751d",
            "dq": "3b1376ff3f73c84d",
            "dkdv": "c00fc157d6a53fac",
        },
    },
    "causal": {
        "dense": {
            "fwd": "f16cf16c79f9793b",
            "dq": "91091985dbd7a606",
            "dkdv": "bfe6e13e1e1452ee",
            "hopper_fwd": "a32dbc22728b20f3",
            "hopper_bwd": "7b341b7e56ac35bc",
        },
        "packed": {
            "fwd": "b6e418a3a3ba2f5d",
            "dq": "f012c30ad7b29242",
            "dkdv": "c20540f939402544",
            "hopper_fwd": "4a126ce040e060a5",
            "hopper_bwd": "ca5a013d5e5be604",
        },
        "segmented": {
            "fwd": "b1e2c18ec069b0c8",
            "dq": "0b5446320c51eebe",
            "dkdv": "6d7470b8d90396eb",
        },
    },
    "causal_dropout": {
        "dense": {
            "fwd": "3af97b90f566a311",
            "dq": "f3a093c46b542795",
            "dkdv": "595767c0d6517257",
            "hopper_fwd": "fe45b4a912ca11df",
            "hopper_bwd": "998890d3cd006409",
        },
        "packed": {
            "fwd": "a507307a01498ab9",
            "dq": "2dae81df5f863e73",
            "dkdv": "7952bbf8d22630ee",
            "hopper_fwd": "f15ea93ef92de5b7",
            "hopper_bwd": "38d764b016ce35ff",
        },
        "segmented": {
            "fwd": "94b7974590883f00",
            "dq": "445faa46bf5266cd",
            "dkdv": "f9c83b656d7b4042",
        },
    },
    "window": {
        "dense": {
            "fwd": "cfb5becf5e0a0576",
            "dq": "2b3223153fe342e9",
            "dkdv": "0e7f6537241f818e",
            "hopper_fwd": "aaf7d753a2953e01",
            "hopper_bwd": "6ea5f96d6b80eba1",
        },
        "packed": {
            "fwd": "9b10cc5a5ec7eb8c",
            "dq": "f42747ebcc07e309",
            "dkdv": "3837a6a99a03b567",
            "hopper_fwd": "d1f8635532fc0d82",
            "hopper_bwd": "43f1829be1c38203",
        },
        "segmented": {
            "fwd": "ed8959a7ee626ba9",
            "dq": "325779008024f4a6",
            "dkdv": "145d70b20cd8ff61",
        },
    },
    "prefix_lm": {
        "dense": {
            "fwd": "0eb33ebfa8a94caf",
            "dq": "92f7a2ad61a7a7ea",
            "dkdv": "0bc282a4975f4f7a",
            "hopper_fwd": "3a00c44013981911",
            "hopper_bwd": "a912c382a7a4766b",
        },
        "packed": {
            "fwd": "0516465877167b82",
            "dq": "dbd06f2a91f3bd28",
            "dkdv": "55be522a4adc169a",
            "hopper_fwd": "7982fda1f7bcca0a",
            "hopper_bwd": "9cf8808671e745aa",
        },
        "segmented": {
            "fwd": "bf6dd8acaf2d3634",
            "dq": "0891ddf56618bca0",
            "dkdv": "be0d3e20534ca410",
        },
    },
    "document": {
        "dense": {
            "fwd": "d81e5dd65d1e06d4",
            "dq": "8ee5eade28b29a8d",
            "dkdv": "4f3f874780bb93de",
            "hopper_fwd": "49c9e0c0ec7b0cff",
            "hopper_bwd": "84ee60315846cd26",
        },
        "packed": {
            "fwd": "975cfdf7149bf077",
            "dq": "8ad3256dd9a807e7",
            "dkdv": "fabbd70475409e4d",
            "hopper_fwd": "bb0ca576a2cb869c",
            "hopper_bwd": "7c7301b739fbfd48",
        },
        "segmented": {
            "fwd": "af687c239f26b295",
            "dq": "97210508c5066dc1",
            "dkdv": "2fcb4f8b3f5d8d3d",
        },
    },
    "padding": {
        "dense": {
            "fwd": "b8866d8968b90575",
            "dq": "d4ec827b76f4e842",
            "dkdv": "e3ce1d21e8fe8f9a",
            "hopper_fwd": "86c71c11f8c27430",
            "hopper_bwd": "e864757e0e9808d3",
        },
        "packed": {
            "fwd": "b6113b0c7c0a4745",
            "dq": "9a98810d5de356ea",
            "dkdv": "eb2a6cfc6284c069",
            "hopper_fwd": "ad031de825347d8a",
            "hopper_bwd": "b1d95e39e57d47b7",
        },
        "segmented": {
            "fwd": "3d0a17bd8cf4fbeb",
            "dq": "6eed9c540661a47c",
            "dkdv": "bf240fdf462df10b",
        },
    },
    "streaming_llm": {
        "dense": {
            "fwd": "799fa161a5c29029",
            "dq": "b92370fa8b27e793",
            "dkdv": "857c6273f698da81",
            "hopper_fwd": "a61c6f0d22b2a435",
            "hopper_bwd": "a55ab8bcb4f0c07d",
        },
        "packed": {
            "fwd": "fdc53be2493ec8ce",
            "dq": "19afddaee5b2c01d",
            "dkdv": "22e6cb47dfb187ff",
            "hopper_fwd": "894478b6e984abb3",
            "hopper_bwd": "9eea69a185c2ed73",
        },
        "segmented": {
            "fwd": "3de5f2862c47ad3c",
            "dq": "6e9ce7afd88c9ef2",
            "dkdv": "3d3806eeafe86858",
        },
    },
    "natten": {
        "dense": {
            "fwd": "dbd3e9dac3ae2d22",
            "dq": "a31f3375df7d477d",
            "dkdv": "ad2c712fd49d19fe",
            "hopper_fwd": "2125c9d9ff47062e",
            "hopper_bwd": "ff9bb2637840c2fe",
        },
        "packed": {
            "fwd": "51e72e1ca9ea6010",
            "dq": "352bbedf25f01cc9",
            "dkdv": "6e642269dd3b13d8",
            "hopper_fwd": "1dc295fb3d296320",
            "hopper_bwd": "aa2f9bacaa779e04",
        },
        "segmented": {
            "fwd": "cbbcb428b9af603b",
            "dq": "2ca7f5c153f73cd7",
            "dkdv": "c5b705f14d30f79b",
        },
    },
    "softcap": {
        "dense": {
            "fwd": "eb0853df72c3abaa",
            "dq": "71f52667034f2477",
            "dkdv": "b24ce5d3d3aba089",
            "hopper_fwd": "554444dc465cfe21",
            "hopper_bwd": "ae01c8a55360b20c",
        },
        "packed": {
            "fwd": "e39e74f3fa8bb91d",
            "dq": "b5a793cdf79ff3de",
            "dkdv": "b4631b17cc2b43a5",
            "hopper_fwd": "cf77b8500deb2648",
            "hopper_bwd": "4486677a8e1dbdba",
        },
        "segmented": {
            "fwd": "8f413b15faebe579",
            "dq": "8b30b0fb541a906a",
            "dkdv": "27dc513a4a94c90c",
        },
    },
    "gemma2_local": {
        "dense": {
            "fwd": "751c7d505ee07342",
            "dq": "8299ad07ed20d180",
            "dkdv": "6b6d614be71c10b3",
            "hopper_fwd": "42d29a5d7f749fd0",
            "hopper_bwd": "9c3f27464e44c645",
        },
        "packed": {
            "fwd": "37a93964cdd31470",
            "dq": "11f4635c174ccb01",
            "dkdv": "fe118c50ba86a401",
            "hopper_fwd": "ccef60ce0cbea281",
            "hopper_bwd": "5ed61b6cb5cbdef2",
        },
        "segmented": {
            "fwd": "6951c1a68a76e6f1",
            "dq": "20aafddd3fe8882b",
            "dkdv": "32ee91c8e998c01d",
        },
    },
    "alibi": {
        "dense": {
            "fwd": "0968d229c16d0e2a",
            "dq": "e293a8345ebe9619",
            "dkdv": "1b25ba3b7fc42b46",
            "hopper_fwd": "fbe6b1c38cc81dde",
            "hopper_bwd": "cb8b552156f17f4e",
        },
        "packed": {
            "fwd": "4141facc7e1e0204",
            "dq": "b4ba577bde698200",
            "dkdv": "6a9f80871bb9fe76",
            "hopper_fwd": "39f0c3384ad4da66",
            "hopper_bwd": "22d46d53d60b07e6",
        },
        "segmented": {
            "fwd": "5927ada9703707b8",
            "dq": "945ba757d80791c2",
            "dkdv": "2e908d2fbff06942",
        },
    },
    "relative_bias": {
        "dense": {
            "fwd": "77d1cd3240236c63",
            "dq": "d7d5fce1c8d29b61",
            "dkdv": "61c7cf4c1215a8f2",
            "hopper_fwd": "9a21ff9e40bfd5a6",
            "hopper_bwd": "5cc7945abdf2f613",
        },
        "packed": {
            "fwd": "239fd720b70e11b0",
            "dq": "f9db5cb9a63e45fc",
            "dkdv": "2878b05200f9e628",
            "hopper_fwd": "2f70e76e88458ada",
            "hopper_bwd": "efaa1d82e45102d5",
        },
        "segmented": {
            "fwd": "45f3c6e07d539593",
            "dq": "9db33c23a95d30bb",
            "dkdv": "0cb0ffe57a69d039",
        },
    },
    "forgetting": {
        "dense": {
            "fwd": "c6cb153f2989ee6b",
            "dq": "41b859cb808ec41a",
            "dkdv": "5bce81d44ac8c97d",
            "hopper_fwd": "ebd8236de012ea7b",
            "hopper_bwd": "33a2d34fe38be676",
        },
        "packed": {
            "fwd": "3a90e5af5b9d5e68",
            "dq": "86cebbba95d6948e",
            "dkdv": "268a7fe113dbb955",
            "hopper_fwd": "1856a414de788bf8",
            "hopper_bwd": "dc9c520e644674c7",
        },
        "segmented": {
            "fwd": "74550898928b8967",
            "dq": "d67d6634d7a5be9b",
            "dkdv": "d228a8cf5d7a913c",
        },
    },
    "gpt_oss": {
        "dense": {
            "fwd": "286536702430cfdc",
            "dq": "6e041c3d1e84a294",
            "dkdv": "71a622e223a27c3c",
            "hopper_fwd": "addec0f66fb0f86f",
            "hopper_bwd": "b409623a4a49e12d",
        },
        "packed": {
            "fwd": "8b414197f984d4bf",
            "dq": "217f8764b87c566c",
            "dkdv": "a4603d4f56fa695c",
            "hopper_fwd": "8a3f44ba465cc263",
            "hopper_bwd": "1971fc7e217e6208",
        },
        "segmented": {
            "fwd": "5321fbcbd6adfea1",
            "dq": "45b3b516375d8bd2",
            "dkdv": "b9c3462cd9e499e3",
        },
    },
}

# Variants of which a kernel finds nothing for a pair but the product of query and key, scaled.
LINEAR = frozenset(
    {
        "full",
        "causal",
        "window",
        "prefix_lm",
        "document",
        "padding",
        "streaming_llm",
        "natten",
        "gpt_oss",
    }
)

# Variants whose score reads nothing for each key, and calls no function, and which drop nothing.
CHEAP_SCORES = frozenset(
    {
        "full",
        "causal",
        "window",
        "prefix_lm",
        "document",
        "padding",
        "streaming_llm",
        "natten",
        "alibi",
        "gpt_oss",
    }
)

# Variants whose rows visit one long run of keys, from the first on: there Hopper's family is the faster one.
LONG_RUNS = frozenset(
    {
        "full",
        "causal",
        "causal_dropout",
        "prefix_lm",
        "padding",
        "softcap",
        "alibi",
        "relative_bias",
        "forgetting",
    }
)

# Those of them whose rows all visit the same keys.
ALIKE_ROWS = frozenset(
    {
        "full",
    }
)

# Variants whose rows visit runs of keys, and no blocks of a list.
RUNS = frozenset(
    {
        "full",
        "causal",
        "causal_dropout",
        "window",
        "prefix_lm",
        "document",
        "padding",
        "streaming_llm",
        "softcap",
        "gemma2_local",
        "alibi",
        "relative_bias",
        "forgetting",
        "gpt_oss",
    }
)

# Variants whose rows visit keys up to a distance that is not known to be short, or as far as a table says.
BANDS = frozenset(
    {
        "window",
        "document",
        "streaming_llm",
        "gemma2_local",
    }
)

# Variants with a gradient that is added with atomics, in any order.
ATOMIC = frozenset(
    {
        "relative_bias",
    }
)

# Variants whose backward may be one kernel of Hopper's family. Of the others the portable dq gathers something besides.
FUSED_BACKWARDS = frozenset(
    {
        "full",
        "causal",
        "causal_dropout",
        "window",
        "prefix_lm",
        "document",
        "padding",
        "streaming_llm",
        "natten",
        "softcap",
        "gemma2_local",
        "alibi",
        "forgetting",
        "gpt_oss",
    }
)
