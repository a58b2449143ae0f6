#!/bin/sh
# Prints the path of a Python 3.11 or 3.12. PYTHON=... chooses one; it must be of such a version too.
set -u

version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

path_of() {
    "$1" -c 'import sys; print(sys.executable)'
}

if [ -n "${PYTHON:-}" ]; then
    version=$(version_of "$PYTHON") || version="not a Python"
    case "$version" in
        3.11 | 3.12) path_of "$PYTHON"; exit 0 ;;
    esac
    echo "PYTHON=$PYTHON is $version, but flashrt_ros needs Python 3.11 or 3.12:" \
        "name another one, or leave PYTHON unset." >&2
    exit 1
fi

# The system's own python3 first: it is the one whose venv and header packages are most likely there.
for candidate in python3 python3.12 python3.11; do
    case "$(version_of "$candidate")" in
        3.11 | 3.12) path_of "$candidate"; exit 0 ;;
    esac
done

found=$(version_of python3) || found="none"
echo "flashrt_ros needs Python 3.11 or 3.12, and python3 here is: $found. Install one with" \
    "\`apt-get install python3.12\` (Ubuntu 24.04) or \`apt-get install python3.11\` (Debian 12)," \
    "or name one with PYTHON=/path/to/python3.12." >&2
exit 1
