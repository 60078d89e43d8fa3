#!/usr/bin/env bash
# Installs the real servers that tests run against, and what those tests need beside them, where that is possible;
# without them those tests are skipped.
set -euo pipefail

missing=()
command -v redis-server >/dev/null || missing+=(redis-server)
command -v redis-sentinel >/dev/null || missing+=(redis-sentinel)
command -v promtool >/dev/null || missing+=(prometheus)
command -v amtool >/dev/null || missing+=(prometheus-alertmanager)
compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || missing+=(postgresql)
command -v podman >/dev/null || missing+=(podman runc catatonit)
command -v ip >/dev/null || missing+=(iproute2)
command -v wget >/dev/null || missing+=(wget)
command -v chromium >/dev/null || missing+=(chromium)
command -v npm >/dev/null || missing+=(npm)
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "not installed: ${missing[*]}; tests that need them are skipped (as root on Debian this installs them)"
  exit 0
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq || echo "the lists of Debian's packages are as they were: they could not all be read anew"
for package in "${missing[@]}"; do  # one by one: where Node.js is not Debian's, its npm cannot be had, and all else can
  apt-get install -y -qq --no-install-recommends "$package" >/dev/null \
    || echo "not installed: $package; tests that need it are skipped"
done
