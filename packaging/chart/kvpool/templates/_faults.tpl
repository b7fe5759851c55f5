{{/* Faults of values that Kubernetes would take and no daemon could serve with, or only until its memory or its time to stop ends. Each
is a line with the value's name, what it is, and what was expected. files/options.json has the options of kvpool.toml. */}}
{{- define "kvpool.check" -}}
{{- $values := .Values }}
{{- $options := .Files.Get "files/options.json" | fromJson }}
{{- $set := deepCopy $options.defaults }}
{{- range $section, $given := $values.config }}
{{- range $name, $value := $given }}
{{- $_ := set $set (printf "%s.%s" $section $name) (kindIs "string" $value | ternary $value (toJson $value)) }}
{{- end }}
{{- end }}
{{- $faults := list }}

{{- $image := splitList "/" $values.image.repository | last }}
{{- if contains ":" $image }}
{{- $faults = append $faults (printf "image.repository is %s, expected a name without a tag: that is image.tag" $values.image.repository) }}
{{- end }}

{{/* The init container makes it the daemon's own, and the node's other users lose it. */}}
{{- if regexMatch "^/[^/]*$|^/(data|secrets?|s?bin|lib64|lib|proc|sys|usr|(etc|opt)/kvpool)(/|$)|^/(var/(run|lib|log|tmp)|run/(user|lock)|dev/shm)$" $values.runPath }}
{{- $faults = append $faults (printf "runPath is %s, expected a directory of kvpool's own, such as /run/kvpool" $values.runPath) }}
{{- end }}

{{- $read := dict }}
{{- range $name := list "dram.capacity" "dram.segment" "ssd.capacity" "server.stop_timeout" "ssd.stop_timeout" }}
{{- $text := get $set $name }}
{{- $number := include (hasSuffix "timeout" $name | ternary "kvpool.seconds" "kvpool.bytes") $text }}
{{- if $number }}
{{- $_ := set $read $name (float64 $number) }}
{{- else }}
{{- $faults = append $faults (printf "config.%s is %s, expected %s" $name $text (get $options.expected $name)) }}
{{- end }}
{{- end }}

{{- if and (hasKey $read "dram.capacity") (hasKey $read "dram.segment") (ne (get $set "dram.allow_overcommit") "true") }}
{{- $arena := addf (get $read "dram.capacity") (get $read "dram.segment") }}
{{- $kind := eq (get $set "dram.huge_pages") "hugetlb" | ternary "hugepages-2Mi" "memory" }}
{{- $room := get $values.resources $kind | default "0" }}
{{- $room = kindIs "string" $room | ternary $room (toJson $room) }}
{{- if gt $arena (include "kvpool.bytes" (printf "%sB" $room) | float64) }}
{{- $faults = append $faults (printf "resources.%s is %s, expected room for config.dram.capacity, %s, and config.dram.segment, %s" $kind $room (get $set "dram.capacity") (get $set "dram.segment")) }}
{{- end }}
{{- end }}

{{- if and (hasKey $read "server.stop_timeout") (hasKey $read "ssd.stop_timeout") }}
{{- $stop := addf (get $read "server.stop_timeout") (empty $values.ssdPath | ternary 0.0 (get $read "ssd.stop_timeout")) }}
{{- if le (float64 $values.terminationGracePeriodSeconds) $stop }}
{{- $disk := empty $values.ssdPath | ternary "" (printf " and config.ssd.stop_timeout, %s," (get $set "ssd.stop_timeout")) }}
{{- $faults = append $faults (printf "terminationGracePeriodSeconds is %d, expected more than config.server.stop_timeout, %s,%s" (int64 $values.terminationGracePeriodSeconds) (get $set "server.stop_timeout") $disk | trimSuffix ",") }}
{{- end }}
{{- end }}

{{- if hasKey $read "ssd.capacity" }}
{{- if and $values.ssdPath (eq (get $read "ssd.capacity") 0.0) }}
{{- $faults = append $faults (printf "config.ssd.capacity is %s, expected the size of the tier in ssdPath, %s" (get $set "ssd.capacity") $values.ssdPath) }}
{{- else if and (not $values.ssdPath) (gt (get $read "ssd.capacity") 0.0) }}
{{- $faults = append $faults (printf "ssdPath is empty, expected a directory of the node because config.ssd.capacity is %s" (get $set "ssd.capacity")) }}
{{- end }}
{{- end }}

{{- if and (not $values.gpu.enabled) (ne (get $set "hbm.device") "off") }}
{{- $faults = append $faults (printf "gpu.enabled is false, expected true because config.hbm.device is %s" (get $set "hbm.device")) }}
{{- end }}

{{- if not $values.secretName }}
{{- if $values.peer.enabled }}
{{- $faults = append $faults "secretName is empty, expected a secret with node.key and nodes.allow because peer.enabled is true" }}
{{- end }}
{{- range $name := $options.files }}
{{- if hasPrefix "/secrets/" (get $set $name) }}
{{- $faults = append $faults (printf "secretName is empty, expected a secret because config.%s is %s" $name (get $set $name)) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Of a pod: every address, its own, and the loopback, which the daemon's metrics have. */}}
{{- $taken := list }}
{{- if $values.metrics.enabled }}
{{- $taken = list (dict "name" "the proxy of metrics.enabled" "host" "*" "port" "8443") (dict "name" "the daemon's metrics" "host" "127.0.0.1" "port" "9469") }}
{{- end }}
{{- $wanted := list }}
{{- if $values.peer.enabled }}
{{- range $name := list "port" "streamPort" }}
{{- $wanted = append $wanted (dict "name" (printf "peer.%s" $name) "value" (get $values.peer $name | int64 | toString) "host" "own" "port" (get $values.peer $name | int64 | toString)) }}
{{- end }}
{{- end }}
{{- range $name := list "events.publish" "events.replay" }}
{{- with get $set $name }}
{{- if hasPrefix "tcp://" . }}
{{- $port := splitList ":" . | last }}
{{- $wanted = append $wanted (dict "name" (printf "config.%s" $name) "value" . "host" (trimPrefix "tcp://" . | trimSuffix (printf ":%s" $port)) "port" $port) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $one := $wanted }}
{{- range $other := $taken }}
{{- if and (eq $one.port $other.port) (ne $one.port "0") (or (eq $one.host $other.host) (eq $other.host "*")) }}
{{- $faults = append $faults (printf "%s is %s, expected another port than that of %s" $one.name $one.value $other.name) }}
{{- end }}
{{- end }}
{{- $taken = append $taken $one }}
{{- end }}

{{- if $faults }}
{{- printf "\n%s" (join "\n" $faults) | fail }}
{{- end }}
{{- end }}

{{/* Bytes of a size as kvpool.toml has them; of a quantity of Kubernetes where a B is put behind it. Empty: it is none. */}}
{{- define "kvpool.bytes" -}}
{{- $units := dict "" 1 "B" 1 "KIB" 1024 "MIB" 1048576 "GIB" 1073741824 "TIB" 1099511627776 "KB" 1000 "MB" 1000000 "GB" 1000000000 "TB" 1000000000000 }}
{{- include "kvpool.quantity" (dict "text" (upper .) "units" $units) }}
{{- end }}

{{/* Seconds of a duration. Empty: it is none. */}}
{{- define "kvpool.seconds" -}}
{{- $units := dict "ns" 0.000000001 "us" 0.000001 "ms" 0.001 "s" 1 "m" 60 "h" 3600 "d" 86400 }}
{{- include "kvpool.quantity" (dict "text" . "units" $units) }}
{{- end }}

{{/* `text`, a number and one of `units`, as a plain number. Empty: it is none. */}}
{{- define "kvpool.quantity" -}}
{{- $text := trim .text }}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" $text }}
{{- $unit := trimPrefix $number $text | trim }}
{{- if and $number (hasKey .units $unit) }}
{{- mulf (float64 $number) (get .units $unit) | printf "%.3f" }}
{{- end }}
{{- end }}
