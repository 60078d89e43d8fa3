#!/bin/sh
# Makes the files that docker-compose.yml reads from deploy/secrets/ (or the folder given): random passwords, and the
# place for the address that alerts go to. One that is there already stays as it is, so this can be run again.
set -eu

folder=${1:-$(dirname "$0")/secrets}
mkdir -p "$folder"
# Containers read the files as users of their own; on the host only the folder's owner gets to them.
chmod 700 "$folder"
keep() {  # keep NAME: standard input becomes the file, whole or not at all
  cat > "$folder/$1.new"
  if [ ! -s "$folder/$1.new" ]; then  # what makes it is missing, or failed: a pipe's status is that of its end
    rm "$folder/$1.new"
    echo "nothing was made for $folder/$1" >&2
    exit 1
  fi
  chmod 644 "$folder/$1.new"
  mv "$folder/$1.new" "$folder/$1"
  echo "made $folder/$1"
}

for name in postgres_password grafana_admin_password; do
  [ -s "$folder/$name" ] || head -c 24 /dev/urandom | base64 | tr '+/' '-_' | tr -d '\n' | keep "$name"
done
if [ ! -s "$folder/alert_webhook_url" ]; then
  echo http://127.0.0.1:9/nobody-listens-here | keep alert_webhook_url
  echo "write the address of your webhook there: until then alerts reach nobody"
fi
