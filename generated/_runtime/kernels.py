# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# template: ops/kernels.py.jinja
# hash: 46c822b60a553c63
"""What each kernel's code is, as a hash: tuned tiles hold for the code they were measured on."""

# variant -> mode of calls -> pass -> hash of the kernel's file without comments and docstrings
KERNEL_HASHES: dict[str, dict[str, dict[str, str]]] = {
    "full": {
        "dense": {
            "fwd": "f03ccc6204328389",
            "dq": "ef72253d974a5702",
            "dkdv": "6cd20d135704e992",
        },
        "packed": {
            "fwd": "52747dbca0f2a30c",
            "dq": "02379ce2708a0ae2",
            "dkdv": "78a606ecbbe8abd0",
        },
        "segmented": {
            "fwd": "8fb8f7da52cd31ca",
            "dq": "9ab48c894dac27d3",
            "dkdv": "05e7ded005192080",
        },
    },
    "causal": {
        "dense": {
            "fwd": "e4066c6bcdccc932",
            "dq": "1efb00ebc357861f",
            "dkdv": "00266deb606b0e78",
        },
        "packed": {
            "fwd": "0d04f8c9153b1c94",
            "dq": "ddfc48e70f3f2b25",
            "dkdv": "bd7cb2ca31b9e96a",
        },
        "segmented": {
            "fwd": "bfddcc064da54fe9",
            "dq": "7c76ca51e3d3c873",
            "dkdv": "5c31ea4bb87a9f7a",
        },
    },
    "causal_dropout": {
        "dense": {
            "fwd": "1325db592593483d",
            "dq": "b49d16233dbe58df",
            "dkdv": "a34e31dc1c63ba7d",
        },
        "packed": {
            "fwd": "61b99a37d0fd926c",
            "dq": "8e09b6f8fec41987",
            "dkdv": "162b930b15c37d56",
        },
        "segmented": {
            "fwd": "d1a2135e7ff7e2dd",
            "dq": "71db1163b0a5b898",
            "dkdv": "6a0ac31bce0a6fe1",
        },
    },
    "window": {
        "dense": {
            "fwd": "41413fc34b1499a0",
            "dq": "8a7f0ac3d8e8ae8e",
            "dkdv": "6b605b8552c2bdba",
        },
        "packed": {
            "fwd": "6a07852c77d00361",
            "dq": "a645cf87de145130",
            "dkdv": "b1716be16eae9256",
        },
        "segmented": {
            "fwd": "9f7c5116f365fe2f",
            "dq": "cde5b2a1833e760a",
            "dkdv": "767f81211bdb90fd",
        },
    },
    "prefix_lm": {
        "dense": {
            "fwd": "0670eec8a8597595",
            "dq": "374e1da4a9aa70cd",
            "dkdv": "88f6a292dc297fef",
        },
        "packed": {
            "fwd": "94ae6f631b850cce",
            "dq": "5ebc43e1d406c57c",
            "dkdv": "b2866f19d21d04f2",
        },
        "segmented": {
            "fwd": "703f43062b5d9d22",
            "dq": "3686e4bbc835f6c2",
            "dkdv": "5a5c48b9dbc76a71",
        },
    },
    "document": {
        "dense": {
            "fwd": "e283df1c6e57ed87",
            "dq": "a413c1cea5a626b9",
            "dkdv": "900b771d3b509f35",
        },
        "packed": {
            "fwd": "39d9240c42aaf9d9",
            "dq": "61ffd6573f02e52c",
            "dkdv": "76a4beb97c66c757",
        },
        "segmented": {
            "fwd": "e48c4072f293b5c2",
            "dq": "edb58a2c8ac8cbfc",
            "dkdv": "8ddca38a88bec966",
        },
    },
    "padding": {
        "dense": {
            "fwd": "09d9629de877c124",
            "dq": "c35b3724ca906064",
            "dkdv": "9026c5521f869efc",
        },
        "packed": {
            "fwd": "3ada6566fdb4f780",
            "dq": "5bfe005d2a57f8e0",
            "dkdv": "ced0b126e2bfda58",
        },
        "segmented": {
            "fwd": "ebf9b4a96728c111",
            "dq": "2cc2932e8454b64a",
            "dkdv": "7d5470c89ff8a929",
        },
    },
    "streaming_llm": {
        "dense": {
            "fwd": "e35ba27920545eb4",
            "dq": "cd2fdf846897e99b",
            "dkdv": "aef487cbfb1c34b6",
        },
        "packed": {
            "fwd": "9e0ca6cc367e9928",
            "dq": "26b271d05bc543ec",
            "dkdv": "014123e2e1e22a7b",
        },
        "segmented": {
            "fwd": "77cf4cbb251f10a4",
            "dq": "97a92926f6f30974",
            "dkdv": "e086527a6084cbb8",
        },
    },
    "natten": {
        "dense": {
            "fwd": "e3e939da1ea5516c",
            "dq": "54e7580debdd994e",
            "dkdv": "9c346466b7557830",
        },
        "packed": {
            "fwd": "ee60ff6449c3ff1f",
            "dq": "40fa0adc3304b0af",
            "dkdv": "3907e6c454633f74",
        },
        "segmented": {
            "fwd": "80655194233e1eba",
            "dq": "e0822dd0dedb1149",
            "dkdv": "ac3d60bd4ef880e8",
        },
    },
    "softcap": {
        "dense": {
            "fwd": "b52d45d8c01d93ce",
            "dq": "03d9869ec225ef6e",
            "dkdv": "719c96fed0c5cdd1",
        },
        "packed": {
            "fwd": "67130affc40eef5f",
            "dq": "e6bec2b34594d074",
            "dkdv": "58dd0da47b484487",
        },
        "segmented": {
            "fwd": "38db2fbb09cc766c",
            "dq": "114e509ee2ea5cfd",
            "dkdv": "a4d632ea9382e3d7",
        },
    },
    "gemma2_local": {
        "dense": {
            "fwd": "4dca91ca22725cb7",
            "dq": "14c86b0ccd24e7e2",
            "dkdv": "27d8706a0cadf426",
        },
        "packed": {
            "fwd": "d7de820304c3b25c",
            "dq": "ac8a91d08399a91f",
            "dkdv": "7c3f84314810aad6",
        },
        "segmented": {
            "fwd": "bebd42dbb9c4bcc2",
            "dq": "40ec315343cb5bf3",
            "dkdv": "0410ac8ac1fec1ce",
        },
    },
    "alibi": {
        "dense": {
            "fwd": "06a85adfc8e7d131",
            "dq": "b21bc2a7958adad2",
            "dkdv": "b0787eebd2694cb6",
        },
        "packed": {
            "fwd": "304bed6e9ce87bf0",
            "dq": "87525eaf906d0cd8",
            "dkdv": "9e4089d9b5a200e8",
        },
        "segmented": {
            "fwd": "49441cf6c677c3b7",
            "dq": "e057ce7e141d58ae",
            "dkdv": "81b20d2967ddca75",
        },
    },
    "relative_bias": {
        "dense": {
            "fwd": "19100957f90c266d",
            "dq": "01fc124f05e79abf",
            "dkdv": "603b4bc4d0937ac1",
        },
        "packed": {
            "fwd": "34d69d918155dca7",
            "dq": "4e48442ab2a2cf6f",
            "dkdv": "7ddd103d38515d75",
        },
        "segmented": {
            "fwd": "6f72adc9f7482845",
            "dq": "e9b48902b9b46f97",
            "dkdv": "3757374c35b6e9e6",
        },
    },
    "forgetting": {
        "dense": {
            "fwd": "42d042c2f49daa6f",
            "dq": "cf00714397391490",
            "dkdv": "e255b352a4d270b8",
        },
        "packed": {
            "fwd": "12296ded6fe68759",
            "dq": "a27275a053f19017",
            "dkdv": "05d5afb84412825b",
        },
        "segmented": {
            "fwd": "8960632e854af0dd",
            "dq": "028e9188f1d2b025",
            "dkdv": "793573d4a0efedb1",
        },
    },
    "gpt_oss": {
        "dense": {
            "fwd": "c460e9fc04e042fa",
            "dq": "9f9209e388ae88e6",
            "dkdv": "52e310b00c67cfa5",
        },
        "packed": {
            "fwd": "8e167aee75500728",
            "dq": "b9e33b5748a57d30",
            "dkdv": "52ecea93df1579dc",
        },
        "segmented": {
            "fwd": "ec5dde81be51b59d",
            "dq": "9100c14f928f85e1",
            "dkdv": "c44c8a6e0b3557d0",
        },
    },
}
