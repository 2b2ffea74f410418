# Sourced by launch/smollm2_*.sh: what each of them asks of its arguments, says, and begins with.
# The comment at the top of a script is its usage.

self="$(realpath "$0")"

refuse() { # text
  printf '%s\n' "$1" >&2
  exit 2
}

take() { # directory of the run, DATA as given, files that it must hold; sets out and data
  out="$1"
  if [ -z "$2" ] || [ "${2#-}" != "$2" ]; then
    refuse "$(sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$self")"
  fi
  data="$(realpath -m -- "$2")"
  cd "$(dirname "$self")/.."
  shift 2
  local missing=() file
  for file; do
    [ -f "$data/$file" ] || missing+=("$file")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    refuse "$data lacks ${missing[*]}; name the directory that holds them"
  fi
  if [ -e "$out/source" ] && [ "$(cat "$out/source")" != "$data" ]; then
    refuse "$out was begun with $(cat "$out/source"), and this is $data; move $out elsewhere"
  fi
}

tell() { # number, what, how long on two cores, what is there once it is done ("": always to do)
  printf '  %s. %-58s %s\n' "$1" "$2" "$([ -e "$4" ] && echo 'done before' || echo "$3")"
}

begin() { # ends a dry run; else makes the run's directory, in the environment of its programs
  if [ -n "${DRY_RUN:-}" ]; then
    exit 0
  fi
  . launch/environment.sh
  export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
  mkdir -p "$out"
  echo "$data" > "$out/source"
}

join_and_index() { # sets, with commas: one corpus of their passages and its index, once
  if [ ! -e "$out/data" ]; then
    python launch/join_corpora.py --data="$data" --out="$out/data" --sets="$1"
  fi
  if [ ! -e "$out/data/index" ]; then
    python launch/build_index.py --corpus="$out/data/corpus.jsonl" --out="$out/data/index" \
      --encoder=package:minilm --max_tokens=128 --piece=1024
  fi
}
