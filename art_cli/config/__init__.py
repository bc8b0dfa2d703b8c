"""A run's configuration, composed from YAML and overrides, checked by pydantic. No module imports torch.

schema.py           RunConfig, the whole configuration
sections/           the sections in RunConfig: keys, defaults and descriptions
compose.py          load_config, load_sweep, load_judge, LoadedConfig
config_file.py      reads a YAML file, or raises its mistakes
defaults_list.py    expands a file's defaults list
composition.py      composes a file and overrides to a plain dict
overrides.py        parses `key=value` arguments and expands sweeps; the schema's keys
problems.py         turns pydantic's errors into lines with the nearest valid key or value
key_locations.py    key locations: file and line, or command line
checks.py           conflicts between sections
config_identity.py  configuration hashes and differences
metric_names.py     names of step metrics, and required settings
store_address.py    addresses in an object store
packaged.py         configs/, recipes/ and docs/ in a wheel or a checkout
"""
