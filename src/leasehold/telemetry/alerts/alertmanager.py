"""An example of routing for Alertmanager: critical alerts page, warnings go to a chat, the rest by mail once a day."""

from __future__ import annotations

ROUTING = """\
# Example of an alertmanager.yml for Leasehold's alerts, printed by `leasehold alerts --format alertmanager`.
# Replace the addresses, keep the routes; check it with `amtool check-config`.
global:
  smtp_smarthost: mail.example.com:587
  smtp_from: alertmanager@example.com

route:
  receiver: mail
  group_by: [alertname, engine]
  group_wait: 30s
  group_interval: 5m
  repeat_interval: 24h
  routes:
    - matchers: [alertname=~"Leasehold.*", severity="critical"]
      receiver: page
      group_wait: 0s
      repeat_interval: 1h
    - matchers: [alertname=~"Leasehold.*", severity="warning"]
      receiver: chat
      repeat_interval: 4h

# One cause, one page: alerts that follow from a dead engine or a lost leader are not sent.
inhibit_rules:
  - source_matchers: [alertname=~"LeaseholdEngineDown|LeaseholdNoLeader"]
    target_matchers: [alertname=~"LeaseholdErrors.*|LeaseholdRenewalsFailing|LeaseholdAcquireSlow|LeaseholdBreakerOpen"]
    equal: [engine]
  - source_matchers: [alertname="LeaseholdStorageFull"]
    target_matchers: [alertname="LeaseholdStorageFilling"]
    equal: [engine, member, store]
  - source_matchers: [alertname="LeaseholdErrorsHigh"]
    target_matchers: [alertname="LeaseholdErrors"]
    equal: [engine]

receivers:
  - name: page
    webhook_configs:
      - url: https://pager.example.com/v1/alerts
        send_resolved: true
  - name: chat
    webhook_configs:
      - url: https://chat.example.com/hooks/leasehold
        send_resolved: true
  - name: mail
    email_configs:
      - to: operations@example.com
"""
