{{- define "pdcluster.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 44 | trimAll "-" -}}
{{- end -}}

{{/* The release's name is in every object's, once. */}}
{{- define "pdcluster.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- include "pdcluster.label" .Values.fullnameOverride -}}
{{- else if contains (include "pdcluster.name" .) .Release.Name -}}
{{- include "pdcluster.label" .Release.Name -}}
{{- else -}}
{{- include "pdcluster.label" (printf "%s-%s" .Release.Name (include "pdcluster.name" .)) -}}
{{- end -}}
{{- end -}}

{{/* A name that a Service may have (DNS-1035): without dots, a letter first, no dash last. 44 characters leave room for
     what is put behind it. */}}
{{- define "pdcluster.label" -}}
{{- $name := . | replace "." "-" -}}
{{- if regexMatch "^[0-9]" $name -}}
{{- $name = printf "pd-%s" $name -}}
{{- end -}}
{{- $name | trunc 44 | trimAll "-" -}}
{{- end -}}

{{/* The operator's own objects, and its Lease. */}}
{{- define "pdcluster.operator" -}}
{{- include "pdcluster.fullname" . }}-operator
{{- end -}}

{{/* Never changes in an upgrade: a Deployment's selector cannot. Names are quoted everywhere: `123`,
     `true` and `null` are names too. */}}
{{- define "pdcluster.selector" -}}
app.kubernetes.io/name: {{ include "pdcluster.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{/* The pod of `helm test`. */}}
{{- define "pdcluster.checkSelector" -}}
app.kubernetes.io/name: {{ include "pdcluster.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: check
{{- end -}}

{{- define "pdcluster.labels" -}}
{{ include "pdcluster.selector" . }}
app.kubernetes.io/part-of: pdcluster
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/* A map with the chart's labels beside the user's own. The chart's win: selectors stand on them. */}}
{{- define "pdcluster.labelsBeside" -}}
{{- merge (include "pdcluster.labels" .context | fromYaml) (default dict .labels) | toYaml -}}
{{- end -}}

{{- define "pdcluster.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "pdcluster.operator" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.create is false and serviceAccount.name is empty: name the account that exists, or let the chart make one" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "pdcluster.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The rules of one part of files/rights.yaml; what is there for readers and not for the API server is left out. */}}
{{- define "pdcluster.rules" -}}
{{- $rights := .context.Files.Get "files/rights.yaml" | fromYaml -}}
{{- range get $rights .part }}
- {{ omit . "why" "askedBy" "ofLease" | toYaml | nindent 2 | trim }}
  {{- if .ofLease }}
  resourceNames: [{{ include "pdcluster.operator" $.context | quote }}]
  {{- end }}
{{- end }}
{{- end -}}

{{/* What every container of this chart may do: nothing but compute. */}}
{{- define "pdcluster.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "pdcluster.podSecurity" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end -}}
