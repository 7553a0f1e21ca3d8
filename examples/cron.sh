#!/bin/sh
# Three machines have the same crontab. One machine runs the job at this time; the others find the name held.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export LEASEHOLD_URL="sqlite://$folder/locks.db"  # on several machines: redis://..., postgresql://...
touch "$folder/log"

for machine in web-1 web-2 web-3; do
    # The line of the crontab. --min-hold: longer than the clocks differ; --skip-ok: no mail if another machine runs it.
    leasehold run -n --skip-ok --min-hold 300 hourly-report -- sh -c "echo 'report written by $machine' >> $folder/log" &
done
wait

cat "$folder/log"
test "$(wc -l < "$folder/log")" -eq 1
