"""The demo: real nodes in processes of their own, over DDS, and a parent that watches what really arrives.

`scene` says what is shown; `camera` and `robot` are the processes that play a robot; `processes`, `network` and
`shared_memory` keep them apart from everything else on the machine and end them; `operator_node` gives the instructions
and records; `summary`, `live` and `report` tell what was recorded. `demo.run_demo` puts it together.
"""
