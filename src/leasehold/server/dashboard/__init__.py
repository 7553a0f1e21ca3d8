"""The dashboard: pages of the lock server for people. They show, and decide nothing.

routes.py    which path shows which page, the headers of all answers, and pages about errors
page_data.py what a page is made from: picture and history, as far as the caller may read them
overview.py  what the first page shows        views.py    locks, one lock, owners, incidents
engine.py    the engine, without addresses    records.py  the end of the audit log
words.py     numbers, times and names as people read them
charts.py    lines and bars as SVG            timeline.py who held a lock, and when, as SVG
live.py      the parts of a page that change  stream.py   one stream per tab, with what changed
session.py   logging in with an API key, and the token that shows that a form is ours
actions.py   breaking a lock
templates/   HTML, escaped by default         static/     style sheet, scripts, fonts, icon: all that a browser loads
"""
