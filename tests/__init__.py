"""The tests. gmqtt ships a package of this name: without this file, Python would import that one."""
