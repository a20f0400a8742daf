# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# template: ops/kernels.py.jinja
# hash: 85dc9eb648c0e948
"""What each kernel's code is, as a hash: tuned tiles hold for the code they were measured on."""

# variant -> mode of calls -> pass -> hash of the kernel's file without comments and docstrings
KERNEL_HASHES: dict[str, dict[str, dict[str, str]]] = {
    "full": {
        "dense": {
            "fwd": "5f7c13e5d5a62f8e",
            "dq": "23b8073fbb5e7868",
            "dkdv": "46be56b8a6913495",
            "hopper_fwd": "4808c2b2fd8ec86f",
            "hopper_bwd": "64da4e721da10c36",
        },
        "packed": {
            "fwd": "91a6cf19c5e99c59",
            "dq": "018b5b33f7d8deb9",
            "dkdv": "b254008df5b983a0",
            "hopper_fwd": "21280ce3024d9741",
            "hopper_bwd": "ec93c948ca6b3946",
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
            "hopper_fwd": "4045ad4d94010326",
            "hopper_bwd": "2eb9a310a16ed7a3",
        },
        "packed": {
            "fwd": "b6e418a3a3ba2f5d",
            "dq": "f012c30ad7b29242",
            "dkdv": "c20540f939402544",
            "hopper_fwd": "218e8245ecd3748d",
            "hopper_bwd": "b8b4efdfef097f60",
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
        },
        "packed": {
            "fwd": "a507307a01498ab9",
            "dq": "2dae81df5f863e73",
            "dkdv": "7952bbf8d22630ee",
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
            "hopper_fwd": "4749464441742b28",
            "hopper_bwd": "55ac0150db1ce3cd",
        },
        "packed": {
            "fwd": "9b10cc5a5ec7eb8c",
            "dq": "f42747ebcc07e309",
            "dkdv": "3837a6a99a03b567",
            "hopper_fwd": "74b0f55ee13254cb",
            "hopper_bwd": "42fc61b485a02336",
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
            "hopper_fwd": "118c722d28ba05e1",
            "hopper_bwd": "ec29ff89c0a191aa",
        },
        "packed": {
            "fwd": "0516465877167b82",
            "dq": "dbd06f2a91f3bd28",
            "dkdv": "55be522a4adc169a",
            "hopper_fwd": "cad92183c8fb0896",
            "hopper_bwd": "5ef242e99fe3ad80",
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
            "hopper_fwd": "2c403b4b346a5533",
            "hopper_bwd": "b45ea2081293e55e",
        },
        "packed": {
            "fwd": "975cfdf7149bf077",
            "dq": "8ad3256dd9a807e7",
            "dkdv": "fabbd70475409e4d",
            "hopper_fwd": "9d080d3a0c2c6b4c",
            "hopper_bwd": "4322630c63a2c62b",
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
            "hopper_fwd": "16bdddd1d51eb861",
            "hopper_bwd": "2e5e7768fa9ea490",
        },
        "packed": {
            "fwd": "b6113b0c7c0a4745",
            "dq": "9a98810d5de356ea",
            "dkdv": "eb2a6cfc6284c069",
            "hopper_fwd": "dccdd026a6dd18cd",
            "hopper_bwd": "4b302039684cdf4d",
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
            "hopper_fwd": "8c9f42b4113b53f4",
            "hopper_bwd": "2f0ca3e41d5d220e",
        },
        "packed": {
            "fwd": "fdc53be2493ec8ce",
            "dq": "19afddaee5b2c01d",
            "dkdv": "22e6cb47dfb187ff",
            "hopper_fwd": "3014cf213f60d7da",
            "hopper_bwd": "561e60a35289e119",
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
            "hopper_fwd": "638a61425c2cc14b",
            "hopper_bwd": "741a3a75ddd02e67",
        },
        "packed": {
            "fwd": "51e72e1ca9ea6010",
            "dq": "352bbedf25f01cc9",
            "dkdv": "6e642269dd3b13d8",
            "hopper_fwd": "8182a807837ea868",
            "hopper_bwd": "2bda258982498544",
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
            "hopper_fwd": "4f8dd53a56bfeb5e",
            "hopper_bwd": "0b066bcd50e82db3",
        },
        "packed": {
            "fwd": "e39e74f3fa8bb91d",
            "dq": "b5a793cdf79ff3de",
            "dkdv": "b4631b17cc2b43a5",
            "hopper_fwd": "a59fdcf1fad60130",
            "hopper_bwd": "83017bdf4d5c4808",
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
            "hopper_fwd": "81d0495fc7461ed8",
            "hopper_bwd": "130909db2d403df7",
        },
        "packed": {
            "fwd": "37a93964cdd31470",
            "dq": "11f4635c174ccb01",
            "dkdv": "fe118c50ba86a401",
            "hopper_fwd": "9c686bb6d2ea8e5a",
            "hopper_bwd": "5088c499cf63fa0a",
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
            "hopper_fwd": "5ba1260ce35de757",
            "hopper_bwd": "32f1a1e33f3a5865",
        },
        "packed": {
            "fwd": "4141facc7e1e0204",
            "dq": "b4ba577bde698200",
            "dkdv": "6a9f80871bb9fe76",
            "hopper_fwd": "6b7247c681d02f1c",
            "hopper_bwd": "9965ac576e11e77c",
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
            "hopper_fwd": "461b73d1fb42bb4e",
            "hopper_bwd": "d32bacda07a10094",
        },
        "packed": {
            "fwd": "239fd720b70e11b0",
            "dq": "f9db5cb9a63e45fc",
            "dkdv": "2878b05200f9e628",
            "hopper_fwd": "c4aefffb0cd96164",
            "hopper_bwd": "111c7e3082dbb592",
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
            "hopper_fwd": "7b474a8310f58519",
            "hopper_bwd": "e43beca1a6229d74",
        },
        "packed": {
            "fwd": "3a90e5af5b9d5e68",
            "dq": "86cebbba95d6948e",
            "dkdv": "268a7fe113dbb955",
            "hopper_fwd": "ba7dc393cb9119e9",
            "hopper_bwd": "9190f4b634eca3be",
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
            "hopper_fwd": "0fc605eb7988340b",
            "hopper_bwd": "35950df632f830dc",
        },
        "packed": {
            "fwd": "8b414197f984d4bf",
            "dq": "217f8764b87c566c",
            "dkdv": "a4603d4f56fa695c",
            "hopper_fwd": "1e48f0ae52c19986",
            "hopper_bwd": "1b54b015ad4c4d08",
        },
        "segmented": {
            "fwd": "5321fbcbd6adfea1",
            "dq": "45b3b516375d8bd2",
            "dkdv": "b9c3462cd9e499e3",
        },
    },
}

# Variants whose logit is the product of query and key, scaled.
LINEAR = frozenset(
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

# Variants whose backward may be one kernel of Hopper's family. Of the others the portable dq gathers something besides.
FUSED_BACKWARDS = frozenset(
    {
        "full",
        "causal",
        "window",
        "prefix_lm",
        "document",
        "padding",
        "streaming_llm",
        "natten",
        "softcap",
        "gemma2_local",
        "alibi",
        "gpt_oss",
    }
)
