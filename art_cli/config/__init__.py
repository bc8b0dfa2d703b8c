"""The configuration of a run: Hydra composes it, pydantic checks it. No module here imports torch.

schema.py           RunConfig: the whole configuration of a run
sections/           the sections of RunConfig: every knob, its default and what it means
compose.py          load_config, load_sweep, load_judge, LoadedConfig
composition.py      one YAML file, or its mistakes with their lines; its composition with the overrides by Hydra
overrides.py        reads `key=value` arguments, and expands sweeps; the tree of keys that the schema allows
problems.py         pydantic's errors as lines, each with the nearest right key or value
key_locations.py    the location of each key: file and line, or command line
checks.py           sections that do not fit together; what cannot be trained
config_identity.py  the identity of a training: a configuration's hash, and the differences of two
metric_names.py     a step's metrics that are known before a run, and the settings that some need
store_address.py    the address of a run in an object store
packaged.py         configs/, recipes/ and docs/ in a wheel or a checkout
"""
