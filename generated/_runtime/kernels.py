# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# template: host/kernels.py.jinja
# hash: dc445158123c8821
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
            "hopper_bwd_wide": "d66de4f5a835e925",
            "hopper_delta": "73513f53ce9bfbaa",
        },
        "packed": {
            "fwd": "91a6cf19c5e99c59",
            "dq": "018b5b33f7d8deb9",
            "dkdv": "b254008df5b983a0",
            "hopper_fwd": "c9d81401e9778ba7",
            "hopper_bwd": "c2f0047ed6440fa3",
            "hopper_bwd_wide": "7c5b3e063c2e1dd3",
            "hopper_delta": "b5741b05c95412f0",
        },
        "segmented": {
            "fwd": "a14d3099d522751d",
            "dq": "3b1376ff3f73c84d",
            "dkdv": "c00fc157d6a53fac",
            "hopper_fwd": "7f0fccb16e3312d9",
            "hopper_bwd": "794c1d0a547e6025",
            "hopper_bwd_wide": "19e82d5e5c0baef4",
            "hopper_delta": "0aadbbc6f0536ffc",
        },
    },
    "causal": {
        "dense": {
            "fwd": "f16cf16c79f9793b",
            "dq": "91091985dbd7a606",
            "dkdv": "bfe6e13e1e1452ee",
            "hopper_fwd": "a972c6feacd8163f",
            "hopper_bwd": "03c39363e06cf5ee",
            "hopper_bwd_wide": "53e3b85c8a2cb9c5",
            "hopper_delta": "33b84146748cb875",
        },
        "packed": {
            "fwd": "b6e418a3a3ba2f5d",
            "dq": "f012c30ad7b29242",
            "dkdv": "c20540f939402544",
            "hopper_fwd": "8a814eab73a69190",
            "hopper_bwd": "b219a44d87b6d3f3",
            "hopper_bwd_wide": "e5622328d05f8634",
            "hopper_delta": "bb150c703a77aa29",
        },
        "segmented": {
            "fwd": "b1e2c18ec069b0c8",
            "dq": "0b5446320c51eebe",
            "dkdv": "6d7470b8d90396eb",
            "hopper_fwd": "fdfaa5e76479fa69",
            "hopper_bwd": "ae33e7223db9ac6a",
            "hopper_bwd_wide": "b1d99a4b185bd9e5",
            "hopper_delta": "6e2bfcace1293b5c",
        },
    },
    "causal_dropout": {
        "dense": {
            "fwd": "3af97b90f566a311",
            "dq": "f3a093c46b542795",
            "dkdv": "595767c0d6517257",
            "hopper_fwd": "2967a519d48cc72f",
            "hopper_bwd": "26e44d066632bd29",
            "hopper_bwd_wide": "7593aba6b484dbdb",
            "hopper_delta": "a01756455a76cb74",
        },
        "packed": {
            "fwd": "a507307a01498ab9",
            "dq": "2dae81df5f863e73",
            "dkdv": "7952bbf8d22630ee",
            "hopper_fwd": "6258978d57f4100d",
            "hopper_bwd": "ca490aad4305064e",
            "hopper_bwd_wide": "2d54933d49d7f4f1",
            "hopper_delta": "1c3e1fff81874ee8",
        },
        "segmented": {
            "fwd": "94b7974590883f00",
            "dq": "445faa46bf5266cd",
            "dkdv": "f9c83b656d7b4042",
            "hopper_fwd": "9547a3ad81df246c",
            "hopper_bwd": "679780995408f1c9",
            "hopper_bwd_wide": "7a78abc76d151566",
            "hopper_delta": "bb9012a5b3715583",
        },
    },
    "window": {
        "dense": {
            "fwd": "cfb5becf5e0a0576",
            "dq": "2b3223153fe342e9",
            "dkdv": "0e7f6537241f818e",
            "hopper_fwd": "110179f3d1b51115",
            "hopper_bwd": "df5eff14f09ed202",
            "hopper_bwd_wide": "c3e484929e348d1b",
            "hopper_delta": "cf3730fc310dbee3",
        },
        "packed": {
            "fwd": "9b10cc5a5ec7eb8c",
            "dq": "f42747ebcc07e309",
            "dkdv": "3837a6a99a03b567",
            "hopper_fwd": "6e3f56d046a9401c",
            "hopper_bwd": "5d4fe8f99846bc2a",
            "hopper_bwd_wide": "123ee91d1bd3fa76",
            "hopper_delta": "6761a39c33430aec",
        },
        "segmented": {
            "fwd": "ed8959a7ee626ba9",
            "dq": "325779008024f4a6",
            "dkdv": "145d70b20cd8ff61",
            "hopper_fwd": "c86bf6c790ab59be",
            "hopper_bwd": "46853c9dec6987b7",
            "hopper_bwd_wide": "c98f1edb0ebe24a8",
            "hopper_delta": "f95645b0f0d92bbf",
        },
    },
    "prefix_lm": {
        "dense": {
            "fwd": "0eb33ebfa8a94caf",
            "dq": "92f7a2ad61a7a7ea",
            "dkdv": "0bc282a4975f4f7a",
            "hopper_fwd": "f11d5053ca5ccf1e",
            "hopper_bwd": "a912c382a7a4766b",
            "hopper_bwd_wide": "b8adb5fee1f3f7b3",
            "hopper_delta": "2c0e876c97211d5d",
        },
        "packed": {
            "fwd": "0516465877167b82",
            "dq": "dbd06f2a91f3bd28",
            "dkdv": "55be522a4adc169a",
            "hopper_fwd": "34767f7f8e0cfbf4",
            "hopper_bwd": "9cf8808671e745aa",
            "hopper_bwd_wide": "e32fa9e72f64184e",
            "hopper_delta": "cb190733f4f48909",
        },
        "segmented": {
            "fwd": "bf6dd8acaf2d3634",
            "dq": "0891ddf56618bca0",
            "dkdv": "be0d3e20534ca410",
            "hopper_fwd": "639b9a212783b643",
            "hopper_bwd": "d14aa43adac8a955",
            "hopper_bwd_wide": "0ecae858b727077b",
            "hopper_delta": "462fae4a13651fc7",
        },
    },
    "document": {
        "dense": {
            "fwd": "d81e5dd65d1e06d4",
            "dq": "8ee5eade28b29a8d",
            "dkdv": "4f3f874780bb93de",
            "hopper_fwd": "c88ccfff56604fec",
            "hopper_bwd": "8bc217f082855769",
            "hopper_bwd_wide": "edcb7eb350adb552",
            "hopper_delta": "7c6ec910e1445d75",
        },
        "packed": {
            "fwd": "975cfdf7149bf077",
            "dq": "8ad3256dd9a807e7",
            "dkdv": "fabbd70475409e4d",
            "hopper_fwd": "e9c50313abe44ab1",
            "hopper_bwd": "214c8a5630467104",
            "hopper_bwd_wide": "d7a4cf831df6d63b",
            "hopper_delta": "8f5b4e16bedb1592",
        },
        "segmented": {
            "fwd": "af687c239f26b295",
            "dq": "97210508c5066dc1",
            "dkdv": "2fcb4f8b3f5d8d3d",
            "hopper_fwd": "01ff293ae1b08e97",
            "hopper_bwd": "dc70832e4e9a7c7c",
            "hopper_bwd_wide": "b76e8439d926ffb9",
            "hopper_delta": "133cc39681ccdd37",
        },
    },
    "padding": {
        "dense": {
            "fwd": "b8866d8968b90575",
            "dq": "d4ec827b76f4e842",
            "dkdv": "e3ce1d21e8fe8f9a",
            "hopper_fwd": "5f73fe9b2dee0872",
            "hopper_bwd": "0b76f889cb22c511",
            "hopper_bwd_wide": "291b74cbd9d89b46",
            "hopper_delta": "20e731eb863c810b",
        },
        "packed": {
            "fwd": "b6113b0c7c0a4745",
            "dq": "9a98810d5de356ea",
            "dkdv": "eb2a6cfc6284c069",
            "hopper_fwd": "4be2b6e97938e66c",
            "hopper_bwd": "b1d95e39e57d47b7",
            "hopper_bwd_wide": "7744f0d5f517c53f",
            "hopper_delta": "545a5bd57dff84ac",
        },
        "segmented": {
            "fwd": "3d0a17bd8cf4fbeb",
            "dq": "6eed9c540661a47c",
            "dkdv": "bf240fdf462df10b",
            "hopper_fwd": "69c4706de8a6407d",
            "hopper_bwd": "a8ff25b31cdc2388",
            "hopper_bwd_wide": "d4cebe5c0ee5458f",
            "hopper_delta": "44c829c2d99b1c36",
        },
    },
    "streaming_llm": {
        "dense": {
            "fwd": "799fa161a5c29029",
            "dq": "b92370fa8b27e793",
            "dkdv": "857c6273f698da81",
            "hopper_fwd": "2f96c733df4bad7c",
            "hopper_bwd": "2abd95cb08612721",
            "hopper_bwd_wide": "de3a1e335aafcda0",
            "hopper_delta": "0942e068c879394b",
        },
        "packed": {
            "fwd": "fdc53be2493ec8ce",
            "dq": "19afddaee5b2c01d",
            "dkdv": "22e6cb47dfb187ff",
            "hopper_fwd": "fdf97def4be71eb9",
            "hopper_bwd": "2069e454286a615f",
            "hopper_bwd_wide": "cbc537eb63b37169",
            "hopper_delta": "95f3789ce25f06a3",
        },
        "segmented": {
            "fwd": "3de5f2862c47ad3c",
            "dq": "6e9ce7afd88c9ef2",
            "dkdv": "3d3806eeafe86858",
            "hopper_fwd": "a5c6bbf90566e482",
            "hopper_bwd": "1c2dba0d89ea6989",
            "hopper_bwd_wide": "cd108f647e3d20b7",
            "hopper_delta": "1e13a9510925251f",
        },
    },
    "natten": {
        "dense": {
            "fwd": "dbd3e9dac3ae2d22",
            "dq": "a31f3375df7d477d",
            "dkdv": "ad2c712fd49d19fe",
            "hopper_fwd": "ede5f2a741bef726",
            "hopper_bwd": "ff9bb2637840c2fe",
            "hopper_bwd_wide": "ab11c941bf239f3e",
            "hopper_delta": "706ccac5d9a36556",
        },
        "packed": {
            "fwd": "51e72e1ca9ea6010",
            "dq": "352bbedf25f01cc9",
            "dkdv": "6e642269dd3b13d8",
            "hopper_fwd": "a1f4f646df8e9688",
            "hopper_bwd": "aa2f9bacaa779e04",
            "hopper_bwd_wide": "0720b3556ac4a1a8",
            "hopper_delta": "31c520071f1a01fa",
        },
        "segmented": {
            "fwd": "cbbcb428b9af603b",
            "dq": "2ca7f5c153f73cd7",
            "dkdv": "c5b705f14d30f79b",
            "hopper_fwd": "dc95f418f319b946",
            "hopper_bwd": "a1c9cedc0d3aee05",
            "hopper_bwd_wide": "a64e4a2115d10358",
            "hopper_delta": "be411b4454b85bdc",
        },
    },
    "softcap": {
        "dense": {
            "fwd": "eb0853df72c3abaa",
            "dq": "71f52667034f2477",
            "dkdv": "b24ce5d3d3aba089",
            "hopper_fwd": "02e8ebadac164617",
            "hopper_bwd": "819d168f920dea4a",
            "hopper_bwd_wide": "ae81ec7317ce174d",
            "hopper_delta": "13e2148fc2527106",
        },
        "packed": {
            "fwd": "e39e74f3fa8bb91d",
            "dq": "b5a793cdf79ff3de",
            "dkdv": "b4631b17cc2b43a5",
            "hopper_fwd": "8b5d3952e585eac9",
            "hopper_bwd": "80587e979885dbfd",
            "hopper_bwd_wide": "fdd76dfde76ab924",
            "hopper_delta": "df19fddd68a7f13e",
        },
        "segmented": {
            "fwd": "8f413b15faebe579",
            "dq": "8b30b0fb541a906a",
            "dkdv": "27dc513a4a94c90c",
            "hopper_fwd": "096511858e9cfc53",
            "hopper_bwd": "2f4951bfa95740e0",
            "hopper_bwd_wide": "8378be00117573f5",
            "hopper_delta": "dbfa1e5aeacdab2c",
        },
    },
    "gemma2_local": {
        "dense": {
            "fwd": "751c7d505ee07342",
            "dq": "8299ad07ed20d180",
            "dkdv": "6b6d614be71c10b3",
            "hopper_fwd": "94ab9ef9bbc7e508",
            "hopper_bwd": "f3d2ce8721d952aa",
            "hopper_bwd_wide": "e6e0b59e41fd4215",
            "hopper_delta": "bfe5737579f73695",
        },
        "packed": {
            "fwd": "37a93964cdd31470",
            "dq": "11f4635c174ccb01",
            "dkdv": "fe118c50ba86a401",
            "hopper_fwd": "6b48c69eed7003f4",
            "hopper_bwd": "648571d23b19e7f1",
            "hopper_bwd_wide": "9649c845e429ac93",
            "hopper_delta": "e4fd2885ad28d578",
        },
        "segmented": {
            "fwd": "6951c1a68a76e6f1",
            "dq": "20aafddd3fe8882b",
            "dkdv": "32ee91c8e998c01d",
            "hopper_fwd": "a3434c741b582b37",
            "hopper_bwd": "64bc97549a039358",
            "hopper_bwd_wide": "7093c75974be56eb",
            "hopper_delta": "95eca7cb9190db25",
        },
    },
    "alibi": {
        "dense": {
            "fwd": "0968d229c16d0e2a",
            "dq": "e293a8345ebe9619",
            "dkdv": "1b25ba3b7fc42b46",
            "hopper_fwd": "3c13270851c1bd2c",
            "hopper_bwd": "09aae3090564b359",
            "hopper_bwd_wide": "9bdcc15d7a80c669",
            "hopper_delta": "3e4d85d59776daca",
        },
        "packed": {
            "fwd": "4141facc7e1e0204",
            "dq": "b4ba577bde698200",
            "dkdv": "6a9f80871bb9fe76",
            "hopper_fwd": "cb2551417cf9b52f",
            "hopper_bwd": "8aaf75c60e0f08a3",
            "hopper_bwd_wide": "794475d369ce8cba",
            "hopper_delta": "f3be0ddad5801199",
        },
        "segmented": {
            "fwd": "5927ada9703707b8",
            "dq": "945ba757d80791c2",
            "dkdv": "2e908d2fbff06942",
            "hopper_fwd": "6f71e42424d0dd86",
            "hopper_bwd": "a4682a7f87bf8bc5",
            "hopper_bwd_wide": "bd02c0d4b8c6f5ca",
            "hopper_delta": "fb3f421b6295a00a",
        },
    },
    "relative_bias": {
        "dense": {
            "fwd": "77d1cd3240236c63",
            "dq": "d7d5fce1c8d29b61",
            "dkdv": "61c7cf4c1215a8f2",
            "hopper_fwd": "30fad80552e2a838",
            "hopper_bwd": "94c3c35b6bc563dd",
            "hopper_bwd_wide": "68d2ba444147f65d",
            "hopper_delta": "48f45e82cb4fd822",
        },
        "packed": {
            "fwd": "239fd720b70e11b0",
            "dq": "f9db5cb9a63e45fc",
            "dkdv": "2878b05200f9e628",
            "hopper_fwd": "65952519966c4e9c",
            "hopper_bwd": "8d8b1026624c7233",
            "hopper_bwd_wide": "b8d11f7d6cfac96c",
            "hopper_delta": "e7d7eefc6f081a94",
        },
        "segmented": {
            "fwd": "45f3c6e07d539593",
            "dq": "9db33c23a95d30bb",
            "dkdv": "0cb0ffe57a69d039",
            "hopper_fwd": "4ecae4901783297b",
            "hopper_bwd": "f8864025a6f15dd9",
            "hopper_bwd_wide": "9567534733d06d35",
            "hopper_delta": "9c0214e1a0484dc9",
        },
    },
    "forgetting": {
        "dense": {
            "fwd": "c6cb153f2989ee6b",
            "dq": "41b859cb808ec41a",
            "dkdv": "5bce81d44ac8c97d",
            "hopper_fwd": "524c2edf457f8908",
            "hopper_bwd": "4caf0bc617637c4a",
            "hopper_bwd_wide": "5877494a01b02964",
            "hopper_delta": "ef2f79f29a67e6b2",
        },
        "packed": {
            "fwd": "3a90e5af5b9d5e68",
            "dq": "86cebbba95d6948e",
            "dkdv": "268a7fe113dbb955",
            "hopper_fwd": "72ff4201ba9f0d86",
            "hopper_bwd": "421c0f95e1e33d51",
            "hopper_bwd_wide": "89f9184781431b73",
            "hopper_delta": "8774040d8b65e3a4",
        },
        "segmented": {
            "fwd": "74550898928b8967",
            "dq": "d67d6634d7a5be9b",
            "dkdv": "d228a8cf5d7a913c",
            "hopper_fwd": "e724ab6fdbe15f91",
            "hopper_bwd": "a9a8ad462c66e3c3",
            "hopper_bwd_wide": "4d8b372583ee8d4c",
            "hopper_delta": "56a534663fc100ca",
        },
    },
    "gpt_oss": {
        "dense": {
            "fwd": "286536702430cfdc",
            "dq": "6e041c3d1e84a294",
            "dkdv": "71a622e223a27c3c",
            "hopper_fwd": "2f0600562f43313f",
            "hopper_bwd": "8d31b42d3e0f1de0",
            "hopper_bwd_wide": "08defbde696779ec",
            "hopper_delta": "925f9f82e0dd51e7",
        },
        "packed": {
            "fwd": "8b414197f984d4bf",
            "dq": "217f8764b87c566c",
            "dkdv": "a4603d4f56fa695c",
            "hopper_fwd": "8c43faa5920fdaa9",
            "hopper_bwd": "5cdb79dfae0b54cf",
            "hopper_bwd_wide": "428ec48ec9e7c3ee",
            "hopper_delta": "66e2cb483f833dc7",
        },
        "segmented": {
            "fwd": "5321fbcbd6adfea1",
            "dq": "45b3b516375d8bd2",
            "dkdv": "b9c3462cd9e499e3",
            "hopper_fwd": "c8b18e8b00775a50",
            "hopper_bwd": "0d330c60fe2b3245",
            "hopper_bwd_wide": "d40e8bb9fbbdf30b",
            "hopper_delta": "fc54b3a3d0d3235f",
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

# Variants whose rows do so in segmented calls.
SEGMENTED_RUNS = frozenset(
    {
        "full",
        "causal",
        "causal_dropout",
        "window",
        "prefix_lm",
        "document",
        "padding",
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
