// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"fmt"

	"go.yaml.in/yaml/v3"
)

// YAML prints the configuration with every default written out. Parse of it returns an equal Config.
func (c *Config) YAML() ([]byte, error) {
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := enc.Encode(object{keys: c.keys()}.write()); err != nil {
		return nil, fmt.Errorf("print the configuration: %w", err)
	}
	return b.Bytes(), nil
}
