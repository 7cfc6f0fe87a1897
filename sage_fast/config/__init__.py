"""The settings of a run: one typed tree, checked once, then frozen. Nothing here imports PyTorch.

- `schema`: the tree with every default, choice, bound and help text; `fields` checks each setting.
- `loader`: `load` reads YAML files and options, `build` takes dotted keys, `dump` writes YAML.
- `places`: what settings name on this machine, relative to the file that names it.
- `engines`, `reward_names`: what choices can do, for code that must not import PyTorch.
- `rank_checks`: checks over several sections; `secrets`: `${NAME}` in arguments of rewards.
- `command_line`: settings as options, their help and their completion.
"""
