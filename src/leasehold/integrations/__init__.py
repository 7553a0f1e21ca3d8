"""Locks where frameworks need them: one module for each framework, which alone imports it.

alembic.py      one process migrates, the others wait
apscheduler.py  one of many processes runs each tick
celery/         tasks of which one runs at a time; a scheduler with a stand-by
django/         locks by the settings of a project
starlette.py    requests that hold a lock, background jobs in one worker; fastapi.py: the same as dependencies
"""
