"""Alerts, a dashboard and a routing example for users of Prometheus, which `leasehold alerts` prints.

rules.py         the one source: recorded series, alerts, thresholds, and what to do when an alert fires
prometheus.py    as a rules file of Prometheus
grafana.py       a dashboard that shows the same series with the same thresholds
alertmanager.py  who is notified: critical alerts page, warnings go to a chat
"""
